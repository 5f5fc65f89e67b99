"""HTTP to a server under evaluation: one event loop in a thread behind plain synchronous calls.

The evaluation is a loop over answers in completion order, so the client hides its concurrency:
`map` keeps a fixed number of requests under way, started strictly in the order given (a server's
prefix cache sees the requests of one item side by side), and yields what comes back.

What may pass with time is tried again: a broken connection, 429 (with its Retry-After) and 5xx,
with pauses that double. What is our own fault (any other 4xx) is reported at once, in the
server's words. Repeated requests are counted, never hidden.
"""

import asyncio
import atexit
import json
import queue
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import aiohttp

from llmbench.bench.errors import BenchConfigError, TargetError

T = TypeVar("T")

MAX_RETRIES: Final = 5
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 60.0
_CONNECT_TIMEOUT_S = 10.0
_MAX_QUOTED = 300  # characters of an answer that an error repeats


@dataclass(frozen=True, slots=True)
class Job:
    """Requests that belong together, sent one behind the other.

    The second one finds in the server's prefix cache what the first one left there.
    """

    path: str
    bodies: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Status and text of one answer, whatever they are."""

    url: str
    status: int
    content_type: str
    text: str
    headers: dict[str, str]

    def json(self) -> Any:
        """The answer's JSON (NaN and Infinity are read); raises TargetError if it is none."""
        try:
            return json.loads(self.text)
        except ValueError:
            error = TargetError(
                f"{self.url} answered HTTP {self.status} with {self.content_type or 'no type'}, "
                f"not JSON: {self.text[:_MAX_QUOTED]!r}"
            )
            error.add_note("give the base URL of an OpenAI-compatible API, such as http://host/v1")
            raise error from None

    def as_error(self, about: str = "") -> TargetError | BenchConfigError:
        """What to raise for a status that is not 200; `about` opens the message."""
        what = f"{about}{self.url} answered HTTP {self.status}: {self._reason()}"
        if self.status in (401, 403):
            refused = BenchConfigError(what)
            refused.add_note("put the server's key into the environment variable OPENAI_API_KEY")
            return refused
        if 300 <= self.status < 400:
            moved = BenchConfigError(f"{what} (to {self.headers.get('Location', 'nowhere')})")
            moved.add_note("give the URL that it redirects to")
            return moved
        return TargetError(what)

    def _reason(self) -> str:
        """The server's own words: OpenAI's, SGLang's, FastAPI's form, or the text as it is."""
        try:
            content = json.loads(self.text)
        except ValueError:
            return self.text[:_MAX_QUOTED] or "no text"
        found = content
        for key in ("error", "message", "detail"):
            if isinstance(found, dict) and key in found:
                found = found[key]
        return str(found)[:_MAX_QUOTED]


def server_root(base_url: str) -> str:
    """The address in front of `/v1` of a base URL given with or without it.

    Raises BenchConfigError for what cannot be one.
    """

    def refuse(why: str, way_out: str) -> BenchConfigError:
        error = BenchConfigError(f"base URL {base_url!r} {why}")
        error.add_note(way_out)
        return error

    if not base_url.startswith(("http://", "https://")):
        raise refuse("does not begin with http:// or https://", "for example http://localhost:8000")
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        note = "an IPv6 address stands in brackets: http://[::1]:8000"
        raise refuse(f"cannot be read: {error}", note) from None
    if not host or port == 0:
        raise refuse("names no host and port", "for example http://localhost:8000")
    if parts.username is not None or parts.password is not None:
        # Neither here nor in a manifest are they repeated.
        holds = BenchConfigError(f"the base URL of {host} holds credentials")
        holds.add_note("put the server's key into the environment variable OPENAI_API_KEY")
        raise holds
    if parts.query or parts.fragment:
        raise refuse("has a query or a fragment", "give the part in front of ? or #")
    path = parts.path.rstrip("/")
    if path.endswith("/completions"):
        raise refuse("is an endpoint", "give the part up to /v1")
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix('/v1')}"


class ServerClient:
    """Requests to one server; its thread and connections stay until `close`, or the exit."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        concurrency: int,
        timeout_s: float,
        max_retries: int = MAX_RETRIES,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        if concurrency < 1:
            raise BenchConfigError(f"concurrency must be at least 1, not {concurrency}")
        if not timeout_s > 0:
            raise BenchConfigError(f"timeout must be positive, not {timeout_s} s")
        self.root = server_root(base_url)
        self.repeats: Counter[str] = Counter()
        """Requests sent again, by the reason."""
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._first_pause_s = first_pause_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="llmbench-http", daemon=True
        )
        self._thread.start()
        self._session = self._wait(self._open())
        atexit.register(self.close)

    def close(self) -> None:
        """Drop what is under way, close the connections, end the thread; may be called again."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        self._wait(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ask(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: dict[str, Any] | None = None,
        *,
        max_retries: int = 1,
    ) -> HttpAnswer:
        """Send one request and give its answer whatever the status; TargetError without one."""
        return self._wait(self._request(method, path, body, max_retries))

    def map(self, jobs: Iterable[Job]) -> Iterator[tuple[int, list[Any]]]:
        """Post jobs, at most `concurrency` at once; yield (number of the job, JSON answers).

        They are drawn in order, on the client's thread, and come in order of completion. The
        first one that fails for good ends the iteration with its error, behind the answers that
        had come.
        """
        done: queue.SimpleQueue[tuple[int, list[Any]] | None] = queue.SimpleQueue()
        running = asyncio.run_coroutine_threadsafe(self._work(jobs, done), self._loop)
        running.add_done_callback(lambda _: done.put(None))
        try:
            while (answered := done.get()) is not None:
                yield answered
            running.result()
        finally:
            running.cancel()

    async def _work(
        self, jobs: Iterable[Job], done: "queue.SimpleQueue[tuple[int, list[Any]] | None]"
    ) -> None:
        source = enumerate(jobs)

        async def draw() -> None:
            for number, job in source:
                answers = []
                for place, body in enumerate(job.bodies):
                    answer = await self._request("POST", job.path, body, self._max_retries)
                    if answer.status != 200:
                        raise answer.as_error(f"request {number}, part {place}: ")
                    answers.append(answer.json())
                done.put((number, answers))

        workers = [asyncio.create_task(draw()) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, max_retries: int
    ) -> HttpAnswer:
        url = f"{self.root}/{path}"
        for number in range(max_retries + 1):
            outcome = await self._once(method, url, body)
            if isinstance(outcome, HttpAnswer) and not _may_pass(outcome.status):
                return outcome
            if number == max_retries:
                break
            if isinstance(outcome, HttpAnswer):
                self.repeats[f"HTTP {outcome.status}"] += 1
            else:
                self.repeats["broken connection"] += 1
            await asyncio.sleep(self._pause_s(number, outcome))
        if isinstance(outcome, TargetError):
            raise outcome
        return outcome

    def _pause_s(self, number: int, outcome: HttpAnswer | TargetError) -> float:
        """How long to wait behind try `number`: doubling, or longer where the server says so."""
        pause = self._first_pause_s * 2.0**number
        if isinstance(outcome, HttpAnswer):
            asked = outcome.headers.get("Retry-After", "")
            pause = max(pause, float(asked) if asked.isdecimal() else 0.0)
        return min(pause, MAX_PAUSE_S)

    async def _once(
        self, method: str, url: str, body: dict[str, Any] | None
    ) -> HttpAnswer | TargetError:
        try:
            async with self._session.request(
                method, url, json=body, allow_redirects=False
            ) as response:
                text = await response.text(errors="replace")
                return HttpAnswer(
                    url, response.status, response.content_type, text, dict(response.headers)
                )
        except TimeoutError:
            error = TargetError(f"{url} gave no answer within {self._timeout_s:g} s")
            error.add_note("raise the timeout, or send fewer requests at once")
        except aiohttp.ClientConnectorError as cause:
            error = TargetError(f"cannot connect to {url}: {cause.os_error}")
            error.add_note("is the server running, and is this its address?")
        except aiohttp.ClientError as cause:
            error = TargetError(f"the connection to {url} broke: {cause or type(cause).__name__}")
        return error

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=self._concurrency),
            timeout=aiohttp.ClientTimeout(
                total=self._timeout_s, sock_connect=min(_CONNECT_TIMEOUT_S, self._timeout_s)
            ),
        )

    async def _shut(self) -> None:
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _may_pass(status: int) -> bool:
    return status == 429 or status >= 500
