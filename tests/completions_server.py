"""A small completions server for tests: real HTTP on localhost, answers from the real engine.

It speaks as one of the servers that are evaluated: `vllm` (prompt_logprobs, and echo), `sglang`
(/generate), `openai` (echo, with or without a generated token), `llama.cpp` (no log-probabilities
of prompts), `text` (takes no token ids and puts a BOS token in front of every text). Only the
fields that an evaluation uses are there. Each request computes alone, as the engine gives it.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Literal, Self

from aiohttp import web

from llmbench.engine.llm import LLM, RequestResult
from llmbench.engine.models.loader import LoadedModel
from llmbench.engine.request import SamplingParams, TokenLogprobs

Dialect = Literal["vllm", "sglang", "openai", "openai-1", "llama.cpp", "text"]
Body = dict[str, Any]


class CompletionsServer:
    """The server in a thread; a context manager.

    `before` may answer in its place, or break the connection with a ConnectionError; `after` may
    change what it answers. Both get the path and the body of the request.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Any,
        dialect: Dialect,
        *,
        model_id: str = "tiny",
        max_model_len: int | None = 200,
        before: Callable[[str, Body], web.Response | None] | None = None,
        after: Callable[[str, Body, Any], Any] | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.dialect = dialect
        self.model_id = model_id
        self.max_model_len = max_model_len
        self.before, self.after, self.delay_s = before, after, delay_s
        self._is_extended = dialect in ("vllm", "sglang")
        self.requests: list[tuple[str, Body]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._at_once = 0
        self._llm = LLM("tiny", loaded=loaded, num_kv_blocks=64, block_size=4)
        self._engine = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        self._runner, self.port = self._wait(self._start())
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def bodies(self, path: str) -> list[Body]:
        """The requests to a path, in the order of their arrival."""
        return [body for found, body in self.requests if found == path]

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self) -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, runner.addresses[0][1]

    async def _handle(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        body = await request.json() if request.method == "POST" else {}
        self.requests.append((path, body))
        self.headers.append(dict(request.headers))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(self.delay_s)
            early = self.before(path, body) if self.before is not None else None
            return early if early is not None else await asyncio.to_thread(self._answer, path, body)
        except ConnectionError:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        finally:
            self._at_once -= 1

    def _answer(self, path: str, body: Body) -> web.Response:
        routes: dict[str, Callable[[Body], Any]] = {
            "v1/models": self._models,
            "v1/completions": self._completions,
        }
        if self.dialect in ("vllm", "sglang", "llama.cpp"):
            routes["tokenize"] = self._tokenize
        if self.dialect == "vllm":
            routes["version"] = lambda _: {"version": "0.11.0"}
        if self.dialect == "sglang":
            routes["generate"] = self._generate
            routes["server_info"] = lambda _: {"version": "0.5.9"}
        if self.dialect == "llama.cpp":
            routes["props"] = lambda _: {
                "build_info": "b6117",
                "default_generation_settings": {"n_ctx": 200},
            }
        if path not in routes:
            return web.json_response({"detail": "Not Found"}, status=404)
        try:
            answer = routes[path](body)
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        if self.after is not None:
            answer = self.after(path, body, answer)
        return web.json_response(answer, headers={"Server": "test-server"})

    def _models(self, _: Body) -> Body:
        row: Body = {"id": self.model_id, "object": "model"}
        if self._is_extended:
            row["max_model_len"] = self.max_model_len
        return {"object": "list", "data": [row]}

    def _tokenize(self, body: Body) -> Body:
        key = "add_special" if self.dialect == "llama.cpp" else "add_special_tokens"
        text = body["content" if self.dialect == "llama.cpp" else "prompt"]
        return {"tokens": self.tokenizer.encode(text, add_special_tokens=body[key])}

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer.encode(prompt)
            return [self.tokenizer.bos_token_id, *ids] if self.dialect == "text" else ids
        if self.dialect == "text":
            raise ValueError("prompt must be a string")
        return prompt

    def _run(self, ids: list[int], **params: Any) -> RequestResult:
        with self._engine:
            params = {"temperature": 0.0, "logprobs": 1} | params
            return self._llm.generate([ids], SamplingParams(**params))[0]

    def _completions(self, body: Body) -> Body:
        ids = self._ids(body["prompt"])
        max_tokens = body.get("max_tokens", 16)
        echo, scores = body.get("echo", False), body.get("prompt_logprobs")
        if echo and self.dialect in ("llama.cpp", "text"):
            raise ValueError("Only no echo is supported")
        if max_tokens == 0 and (self.dialect != "openai" or not echo):
            raise ValueError("max_tokens must be at least 1")
        if scores is not None and self.dialect == "openai":
            raise ValueError("Unrecognized request argument supplied: prompt_logprobs")
        if len(ids) + max_tokens > 200:
            raise ValueError(f"the context is 200 tokens, the request has {len(ids)}")
        result = self._run(
            ids,
            max_tokens=max(1, max_tokens),
            seed=body.get("seed"),
            temperature=body["temperature"],
            stop=tuple(body.get("stop", ())),
            stop_token_ids=tuple(body.get("stop_token_ids", ())),
            # As a checkpoint's generation_config.json may have it.
            repetition_penalty=body.get("repetition_penalty", 1.3 if self._is_extended else 1.0),
            prompt_logprobs=1,
        )
        made = result.answers[0]
        choice: Body = {"index": 0, "text": made.text, "logprobs": None}
        if scores is not None and self.dialect == "vllm":
            rows = [self._by_id(row) for row in result.prompt_logprobs]
            choice["prompt_logprobs"] = [None, *rows]
        if echo and body.get("logprobs") is not None:
            new = made.logprobs if max_tokens else []
            choice["logprobs"] = self._by_text(ids[0], [*result.prompt_logprobs, *new])
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(made.token_ids)}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def _by_id(self, row: TokenLogprobs) -> Body:
        listed = dict([*row.top, (row.token_id, row.logprob)])
        return {
            str(token_id): {"logprob": value, "decoded_token": self._text(token_id)}
            for token_id, value in listed.items()
        }

    def _by_text(self, first_id: int, rows: list[TokenLogprobs]) -> Body:
        return {
            "tokens": [
                self._text(token_id) for token_id in (first_id, *(r.token_id for r in rows))
            ],
            "token_logprobs": [None, *(row.logprob for row in rows)],
            "top_logprobs": [None, *({self._text(i): v for i, v in row.top} for row in rows)],
        }

    def _generate(self, body: Body) -> Body:
        ids, start = body["input_ids"], body["logprob_start_len"]
        assert body["sampling_params"]["max_new_tokens"] == 0
        if len(ids) > 197:
            raise ValueError(f"the limit on inputs is 197 tokens, this has {len(ids)}")
        rows = self._run(ids, max_tokens=1, prompt_logprobs=1).prompt_logprobs[start:]
        own = [[row.logprob, row.token_id, None] for row in rows]
        tops = [[[value, token_id, None] for token_id, value in row.top] for row in rows]
        return {
            "text": "",
            "meta_info": {
                "prompt_tokens": len(ids),
                "input_token_logprobs": [[None, ids[start], None], *own],
                "input_top_logprobs": [None, *tops],
            },
        }

    def _text(self, token_id: int) -> str:
        text = self.tokenizer.decode([token_id])
        assert isinstance(text, str)
        return text
