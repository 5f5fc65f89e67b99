// Tile registers of AMX: eight registers of 16 rows by 64 bytes, and an instruction that adds the
// product of a [16, 32] and a [32, 16] bfloat16 tile to a float32 one.
#pragma once

#include "cpu_vector.h"

#if HAS_BF16_DOT && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_TILES 0
#endif

constexpr int64_t TILE_ROWS = 16;

#if HAS_TILES
// Linux lets a process use tiles only when it asks: ARCH_REQ_XCOMP_PERM for XTILEDATA.
static inline bool may_use_tiles() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The registers are configured per thread. torch's own products use them too, and find their
// configuration again when this ends.
class Tiles {
  public:
    explicit Tiles(const TileConfig& config) {
        _tile_storeconfig(&theirs_);
        _tile_loadconfig(&config);
    }
    ~Tiles() {
        if (theirs_.palette)
            _tile_loadconfig(&theirs_);
        else
            _tile_release();
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

  private:
    TileConfig theirs_;
};
#else
static inline bool may_use_tiles() { return false; }
#endif
