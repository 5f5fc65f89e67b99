"""When a request ends.

Looked at after each single token, also inside a run of accepted drafts, so that nothing behind
the end is kept. Order: end-of-text, stop tokens and stop strings first, then the length cap. A
stop on the very last allowed token is therefore a stop (sglang #31599 had it the other way round
and leaked the tokens behind a stop).

`ignore_eos` switches off the model's own end-of-text tokens and nothing else. Before `min_tokens`
output tokens no stop counts; the length cap always does.
"""

from collections.abc import Sequence

from llmbench.engine.request import Request


def append_until_stop(request: Request, new_token_ids: Sequence[int]) -> int:
    """Append tokens up to the one that ends the request; return how many were kept."""
    num_kept = 0
    for token_id in new_token_ids:
        request.token_ids.append(token_id)
        num_kept += 1
        if check_stop(request):
            break
    return num_kept


def check_stop(request: Request) -> bool:
    """Take the last token into account, and set both reasons if it ends the request.

    To be called once for each output token: it also feeds the detokenizer.
    """
    params = request.sampling_params
    token_id = request.token_ids[-1]
    num_output_tokens = len(request.token_ids) - len(request.prompt_token_ids)
    may_stop = num_output_tokens >= params.min_tokens
    is_eos = may_stop and token_id in request.eos_token_ids and not params.ignore_eos
    is_stop_token = is_eos or (may_stop and token_id in params.stop_token_ids)
    stop_string: str | None = None
    if request.detokenizer is not None:
        stop_string = request.detokenizer.append(token_id, is_stop_token=is_stop_token)
    if is_stop_token:
        request.finish_reason = "stop"
        request.stop_reason = None if is_eos else token_id
    elif stop_string is not None and may_stop:
        request.finish_reason = "stop"
        request.stop_reason = stop_string
    elif num_output_tokens >= request.max_tokens:
        request.finish_reason = "length"
    return request.finish_reason is not None
