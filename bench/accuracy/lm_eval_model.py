"""A model of ours inside lm-evaluation-harness, so that any of its tasks runs on the engine too.

The harness asks three things of a model: log-likelihoods of continuations, log-likelihoods of whole
texts, and answers. An `EvaluatedModel` gives all three, so the class here only turns strings into
token ids, by the same rules as our own evaluation (`encoding.Encoder`), and hands them on in one
go: order, batches and shared prefixes are the engine's affair, not the harness's batch size.

lm-eval is an extra, `pip install 'llmbench[lm-eval]'`; importing this module without it fails with
that line.
"""

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from llmbench.bench.accuracy.answers import cut_at_stops
from llmbench.bench.accuracy.chat import Chat
from llmbench.bench.accuracy.encoding import Encoder
from llmbench.bench.accuracy.lm_eval_peer import GROUPS, local_files, write_overrides
from llmbench.bench.accuracy.model import EvaluatedModel, GenerateRequest
from llmbench.bench.errors import BenchConfigError, BenchError

if importlib.util.find_spec("lm_eval") is None:
    _missing = BenchError("lm-evaluation-harness is not installed")
    _missing.add_note("pip install 'llmbench[lm-eval]'")
    raise _missing

import lm_eval
import lm_eval.tasks
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

if TYPE_CHECKING:
    from llmbench.engine.scoring import ScoreRequest

MAX_GEN_TOKS = 256
"""Longest answer of a task that says nothing about it, as in the harness."""

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_GREEDY_ONLY = ("do_sample", "temperature", "until", *_LENGTHS)

_OFFLINE = {
    "huggingface_hub.constants": "HF_HUB_OFFLINE",
    "datasets.config": "HF_HUB_OFFLINE",
    "evaluate.config": "HF_EVALUATE_OFFLINE",
}
"""Where the harness's libraries keep whether they may use the network."""

Encoded = tuple[Any, list[int], list[int]]
"""(strings that it came from, context ids, continuation ids)."""


@register_model("llmbench")
class LlmbenchLM(TemplateLM):  # type: ignore[misc]
    """An `EvaluatedModel` as the harness sees it."""

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        model: EvaluatedModel | None = None,
        max_length: int | None = None,
        add_bos: bool | None = None,
        template: str | None = None,
        seed: int = 1234,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **engine: Any,
    ) -> None:
        """`pretrained` and `engine` are settings of an EngineConfig; or give a model.

        `template` is the name of one of the tokenizer's chat templates. `batch_size` and
        `max_batch_size` come from the harness and decide nothing here.
        """
        super().__init__()
        if (pretrained is None) == (model is None):
            raise BenchConfigError("expected either `pretrained` or a model")
        self.model = model or _engine_model(pretrained, device, engine)
        self.tokenizer = self.model.tokenizer
        self.max_length = min(max_length or self.model.max_length, self.model.max_length)
        self.encoder = Encoder(self.tokenizer, self.max_length, add_bos=add_bos)
        self.add_bos = add_bos
        self.template = template
        self.seed = seed

    @property
    def eot_token_id(self) -> int:
        """End of text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context is scored behind."""
        return self.encoder.prefix_id

    @property
    def max_gen_toks(self) -> int:
        """Longest answer where a task names none."""
        return MAX_GEN_TOKS

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids of a text; without a word on special tokens, BOS at most once."""
        if add_special_tokens is None:
            has_bos = string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
            add_special_tokens = False if has_bos else self.add_bos
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return [int(token) for token in self.tokenizer.encode(string, **special)]

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, for the harness's result file."""
        if not chat_template:
            return None
        return str(self.tokenizer.get_chat_template(self.template))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as the model's template writes them."""
        from jinja2 import TemplateError

        def render(messages: list[dict[str, str]]) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        try:
            return render(chat_history)
        except TemplateError:  # some templates refuse a system message; the harness leaves it out
            return render([message for message in chat_history if message["role"] != "system"])

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        pair = self.encoder.pair(context, continuation)
        return list(pair.context_ids), list(pair.continuation_ids)

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        asked, places = group_by_context(
            [(context, continuation) for _, context, continuation in requests], self.max_length
        )
        # Contexts with a common beginning side by side, where the prefix cache serves them.
        order = sorted(range(len(asked)), key=lambda index: asked[index].context)
        scored = self.model.score([asked[index] for index in order])
        answers = {order[position]: scores for position, scores in scored}
        found = []
        for request, which in places:
            score = answers[request][which]
            found.append((score.loglikelihood, score.is_greedy))
        for (strings, _, _), answer in zip(requests, found, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of each text."""
        texts = [request.args[0] for request in requests]
        windows = [self.encoder.rolling(text) for text in texts]
        flat = [
            (None, list(window.context_ids), list(window.continuation_ids))
            for parts in windows
            for window in parts
        ]
        scores = iter(self._loglikelihood_tokens(flat))
        sums = [sum(next(scores)[0] for _ in parts) for parts in windows]
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer of each prompt, cut at its stops."""
        asked = [self._generation(*request.args) for request in requests]
        found = [""] * len(asked)
        for index, text in self.model.generate(asked):
            found[index] = cut_at_stops(text, asked[index].until)
        for request, text in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return found

    def _generation(self, context: str, settings: Mapping[str, Any]) -> GenerateRequest:
        if unknown := [name for name in settings if name not in _GREEDY_ONLY]:
            raise BenchError(
                f"the task asks for generation settings that are not supported: "
                f"{', '.join(unknown)}"
            )
        budget = next((settings[name] for name in _LENGTHS if settings.get(name)), MAX_GEN_TOKS)
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        stops.append(str(self.tokenizer.decode([self.eot_token_id])))
        prompt = self.encoder.prompt(context, int(budget))
        temperature = float(settings.get("temperature") or 0.0)
        if settings.get("do_sample") is False:
            temperature = 0.0
        elif settings.get("do_sample") and not temperature:
            temperature = 1.0
        return GenerateRequest(
            prompt=prompt.ids,
            until=tuple(stops),
            max_tokens=prompt.max_tokens,
            temperature=temperature,
            seed=self.seed,
        )

    def get_model_info(self) -> dict[str, Any]:
        """What the answers depend on, for the harness's result file."""
        return {"model_identity": self.model.identity}


def group_by_context(
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]], max_length: int
) -> "tuple[list[ScoreRequest], list[tuple[int, int]]]":
    """Requests, one a context, and (request, continuation) of each pair.

    What is longer than the model reads loses its beginning, as in the harness: the last
    max_length + 1 ids are kept, since the very last one is not read.
    """
    from llmbench.engine.scoring import ScoreRequest

    grouped: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    order: dict[tuple[int, ...], int] = {}
    places = []
    for context, continuation in pairs:
        room = max_length + 1 - len(continuation)
        if room < 1:
            raise BenchError(
                f"expected a continuation of at most {max_length} tokens, found {len(continuation)}"
            )
        kept = tuple(context[-room:])
        continuations = grouped.setdefault(kept, [])
        places.append((order.setdefault(kept, len(order)), len(continuations)))
        continuations.append(tuple(continuation))
    requests = [
        ScoreRequest(context=context, continuations=tuple(continuations))
        for context, continuations in grouped.items()
    ]
    return requests, places


def evaluate_with_lm_eval(
    model: EvaluatedModel,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    data_dir: Path | None = None,
    include: Sequence[Path] = (),
    seed: int = 1234,
    apply_chat_template: bool = False,
    chat_template: str | None = None,
    system_instruction: str | None = None,
    fewshot_as_multiturn: bool | None = None,
    add_bos: bool | None = None,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Run tasks of the harness on a model: its own results as JSON types, `samples` included.

    With `data_dir` the stock tasks that have files there read those, no other task is found, and
    nothing is fetched.

    Raises:
        BenchError: a task without files in `data_dir`, or one that the harness does not know.
    """
    if apply_chat_template:
        Chat(tokenizer=model.tokenizer, template=chat_template)  # refuses what is not there
    lm = LlmbenchLM(
        model=model, add_bos=add_bos, max_length=max_length, template=chat_template, seed=seed
    )
    with TemporaryDirectory() as folder, nullcontext() if data_dir is None else _offline():
        # The harness looks into folders alone, and reads a file there only if its task is asked.
        roots = [path.parent if path.is_file() else path for path in include]
        names, paths = list(tasks), [str(root) for root in dict.fromkeys(roots)]
        if data_dir is not None:
            names = _local_tasks(Path(folder), tasks, data_dir, include)
            paths.append(folder)
        manager = lm_eval.tasks.TaskManager(include_path=paths, include_defaults=data_dir is None)
        known = set(manager.all_tasks)
        if unknown := [name for name in names if name not in known]:
            raise BenchError(f"lm-eval knows no task named {', '.join(unknown)}")
        result = lm_eval.simple_evaluate(
            model=lm,
            tasks=names,
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            apply_chat_template=apply_chat_template,
            system_instruction=system_instruction,
            fewshot_as_multiturn=apply_chat_template
            if fewshot_as_multiturn is None
            else fewshot_as_multiturn,
            fewshot_random_seed=seed,
        )
    plain: dict[str, Any] = json.loads(json.dumps(result, default=_plain))
    return plain


def _plain(value: Any) -> Any:
    """JSON form of what the harness leaves in its results: numpy's numbers, functions of tasks."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.__qualname__ if callable(value) else str(value)


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the hub's libraries off the network; they read the environment only when imported."""
    before = []
    for name, switch in _OFFLINE.items():
        module = importlib.import_module(name)
        before.append((module, switch, getattr(module, switch)))
        setattr(module, switch, True)
    try:
        yield
    finally:
        for module, switch, value in before:
            setattr(module, switch, value)


def _local_tasks(
    folder: Path, tasks: Sequence[str], data_dir: Path, include: Sequence[Path]
) -> list[str]:
    """Write the files that send tasks to local data; returns the tasks' names."""
    stock = Path(lm_eval.tasks.__file__).parent
    own = {name for path in include for file in _task_files(path) for name in _names_in(file)}
    names: list[str] = []
    for name in tasks:
        for member in GROUPS.get(name, (name,)):
            if files := local_files(member):
                names += write_overrides(folder, member, files, data_dir, stock)
            elif member in own:
                names.append(member)
            else:
                error = BenchError(f"expected a task with local files, found `{member}`")
                error.add_note(
                    "without --data-dir its data comes from the hub; a task file of your own "
                    "comes in with --include"
                )
                raise error
    return names


def _task_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.yaml"))


def _names_in(file: Path) -> tuple[str, ...]:
    """What a task file may be asked by; its YAML may have tags of the harness, so no parser."""
    found = re.findall(r"(?m)^(?:task|group|tag): *[\"']?([^\s\"'#\[]+)", file.read_text("utf-8"))
    return (file.stem, *found)


def _engine_model(
    name: str | None, device: str | None, settings: Mapping[str, Any]
) -> EvaluatedModel:
    from llmbench.bench.accuracy.engine_model import EngineModel
    from llmbench.engine.config import EngineConfig

    assert name is not None
    given = dict(settings)
    if device is not None:
        given["device"] = device
    return EngineModel(EngineConfig(model=name, **given))
