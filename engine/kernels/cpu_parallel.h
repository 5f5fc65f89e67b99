// Parallel loops on the OpenMP pool that torch already runs.
//
// A second pool would spin against the first, so no OpenMP library is linked: the caller hands in
// the address of GOMP_parallel, the entry point of GNU's libgomp that LLVM's libomp offers too.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>

typedef void (*ParallelEntry)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

inline ParallelEntry parallel_entry = nullptr;

// body(i) for each i below `items`, in any order, on up to `threads` threads.
template <class Body>
static void parallel_for(int64_t items, int64_t threads, const Body& body) {
    if (threads > items) threads = items;
    if (threads <= 1 || !parallel_entry) {
        for (int64_t i = 0; i < items; i++) body(i);
        return;
    }
    struct Job {
        const Body* body;
        int64_t items;
        std::atomic<int64_t> next;
    } job{&body, items, {0}};
    auto work = [](void* data) {
        Job* job = static_cast<Job*>(data);
        for (;;) {
            int64_t i = job->next.fetch_add(1, std::memory_order_relaxed);
            if (i >= job->items) break;
            (*job->body)(i);
        }
    };
    parallel_entry(work, &job, unsigned(threads), 0);
}

// body(row) for each row; a thread takes neighbouring rows, and little work stays on one thread.
template <class Body>
static void parallel_rows(int64_t rows, int64_t row_size, int64_t threads, const Body& body) {
    // Waking the pool takes about as long as one thread needs for this many elements.
    constexpr int64_t worth_a_thread = 8192;
    int64_t useful = 1 + rows * row_size / worth_a_thread;
    if (threads > useful) threads = useful;
    if (threads > rows) threads = rows;
    parallel_for(threads, threads, [&](int64_t part) {
        for (int64_t i = rows * part / threads; i < rows * (part + 1) / threads; i++) body(i);
    });
}

// Memory that grows and stays with its thread, aligned to cache lines.
class Scratch {
  public:
    ~Scratch() { std::free(data_); }

    float* floats(size_t count) {
        if (count > size_) {
            std::free(data_);
            size_ = (count + 4095) / 4096 * 4096;
            data_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
            if (!data_) std::abort();
        }
        return data_;
    }

  private:
    float* data_ = nullptr;
    size_t size_ = 0;
};
