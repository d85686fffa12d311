"""A reward function that requests the score from a judge or a reward model over HTTP: `reward.path=verl.reward.judge
reward.kwargs={url: ...}`.

It runs like any reward function: `reward.num_workers` calls at once, each within `reward.timeout_s`. Every failure (no
answer, an error, an answer without a score) raises an exception, which makes the sample invalid; it is never a score of
0.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

PROMPT = (
    "Question:\n{question}\n\nReference answer:\n{ground_truth}\n\nAnswer to be judged:\n{answer}\n\nHow good is the "
    "answer? Say why in two sentences, then end with a line `Score: N`, N from 0 (wrong) to 10 (right and complete)."
)
SCORE = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
BUSY = (429, 503)
AGAIN_S = 0.5


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    url: str,
    kind: str = "chat",
    model: str | None = None,
    prompt: str | None = None,
    pattern: str = SCORE,
    scale: float = 10.0,
    max_tokens: int = 512,
    timeout_s: float = 25.0,
    api_key: str | None = None,
) -> float:
    """Return the score of a server. kind=chat: a server of OpenAI's chat completions answers in words, and the last
    match of `pattern` is divided by `scale`. kind=classify: a classifier with one label gives a number (vLLM's and
    SGLang's /classify).

    prompt: with {question}, {answer}, {ground_truth} and the names of extra_info; for classify the text itself.
    timeout_s: for one call; keep it below reward.timeout_s, so that the error gives the cause of the delay.
    """
    if kind not in ("chat", "classify"):
        raise ValueError(f"kind={kind}: it is chat or classify")
    given = {"question": "", **(extra_info or {}), "answer": solution_str, "ground_truth": ground_truth}
    try:
        text = (prompt or (PROMPT if kind == "chat" else "{question}{answer}")).format_map(given)
    except KeyError as e:
        raise ValueError(f"prompt names {{{e.args[0]}}}, and the row's extra_info has {', '.join(given)}") from None
    body: dict[str, Any] = {} if model is None else {"model": model}
    if kind == "classify":
        return label_of(_post(f"{url.rstrip('/')}/classify", body | {"input": text, "text": text}, timeout_s, api_key))
    body |= {"messages": [{"role": "user", "content": text}], "temperature": 0.0, "max_tokens": max_tokens}
    found = _post(f"{url.rstrip('/')}/v1/chat/completions", body, timeout_s, api_key)
    try:
        choice = found["choices"][0]
        prefix = str(choice["message"]["content"])
    except (LookupError, TypeError):
        raise ValueError(f"the judge answered no chat completion: {json.dumps(found)[:200]}") from None
    if choice.get("finish_reason") == "length":
        raise ValueError(f"the judge was cut off after max_tokens={max_tokens}, before its verdict: give it more")
    if (ended := choice.get("finish_reason")) not in (None, "stop"):  # a truncated number would be another number
        raise ValueError(f"the judge was ended before its verdict (finish_reason={ended!r}): is it being stopped?")
    if not (scores := re.findall(pattern, prefix)):
        raise ValueError(f"the judge gave no score: ...{' '.join(prefix.split())[-200:]!r} has no {pattern}")
    if pattern == SCORE and not 0 <= float(scores[-1]) <= scale:
        raise ValueError(f"the judge's score of {scores[-1]} is not within 0 and scale={scale:g}")
    return float(scores[-1]) / scale


def label_of(answer: Any) -> float:
    """Return the number in vLLM's {"data": [{"probs": [x]}]} or SGLang's {"embedding": [x]}, which may be in a list."""
    row = answer["data"] if isinstance(answer, dict) and "data" in answer else answer
    row = row[0] if isinstance(row, list) else row
    values = row["probs"] if "probs" in row else row["embedding"]
    if len(values) != 1:
        raise ValueError(f"the classifier has {len(values)} labels; one is needed, whose value is the reward")
    return float(values[0])


def _post(url: str, body: Mapping[str, Any], timeout_s: float, api_key: str | None) -> Any:
    """Send the request and return the answer. If the server is busy, repeat the request until the deadline."""
    head = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    request, end_s = urllib.request.Request(url, json.dumps(body).encode(), head), time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=max(end_s - time.monotonic(), 0.01)) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as e:
            prefix = " ".join(e.read().decode(errors="replace").split())[:300]
            if e.code not in BUSY or time.monotonic() + AGAIN_S > end_s:
                raise RuntimeError(f"{url}: HTTP {e.code}: {prefix}") from None
            time.sleep(AGAIN_S)
        except (urllib.error.URLError, TimeoutError) as e:
            raise RuntimeError(f"{url}: {e}; does the judge run there?") from None
