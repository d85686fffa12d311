"""The parts of docs/algorithms that follow from the specs: the settings of each preset, how it is run, and the index.
The rest of a page is written by hand; `python bench/cards.py docs/algorithms` renews these parts of the pages that are
there.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.algorithms.meanings import MEANINGS
from verl.algorithms.presets import PRESETS, Preset, altered_settings, knobs
from verl.algorithms.specs import GDPO, short

INDEX = "README.md"
AXES = ("aggregation", "selection")
_REUSED = {"step.updates_per_step": "4"}
_TAUGHT = {"teacher.path": "DIR"}
_EXACT = {"algorithm.kl_reward_coef": "0"}
_CRITIC = {"critic.lr": "5e-4", "algorithm.critic_warmup_steps": "5", **_EXACT}
QUICKSTART: Mapping[str, Mapping[str, str]] = {
    "ppo": {**_CRITIC, "algorithm.lam": "1.0"},
    "pf_ppo": {**_CRITIC, "algorithm.lam": "1.0"},
    "turn_ppo": {**_CRITIC, "algorithm.lam": "1.0"},
    "vapo": {**_CRITIC, "algorithm.options.length_adaptive_alpha": "1.0"},
    "drgrpo": {"algorithm.horizon_tokens": "48"},
    "gdpo": {"algorithm.options.reward_components": "[right,form]", "reward.path": "bench/two_rewards.py"},
    "pass_at_k": {"step.prompts_per_step": "64", "step.samples_per_prompt": "4"},
    **dict.fromkeys(("rloo", "remax", "reinforce_plus_plus"), _EXACT),
    **dict.fromkeys(("gspo", "gspo_token", "cispo", "sapo", "gmpo", "kl_cov", "clip_cov", "decoupled_ppo"), _REUSED),
    **dict.fromkeys(("dppo_tv", "dppo_kl", "dro", "luspo", "vespo", "intellect_ipo"), _REUSED),
    **dict.fromkeys(("opd", "iw_opd", "gkd", "gkd_topk"), _TAUGHT),
}
"""Overrides that suit a run of the quickstart's size (arithmetic, about 35 tokens an answer); the reason is in its
card."""


def recommended(name: str) -> dict[str, str]:
    """Overrides over recipe=quickstart for this algorithm; null gives the aggregation back to the preset."""
    return {"algorithm.name": name, "algorithm.aggregation": "null", **QUICKSTART.get(name, {})}


def launch(preset: Preset) -> tuple[str, str]:
    """The plain command line, and one for a task of the quickstart's size."""
    needed = {" teacher.path=DIR": "teacher" in preset.roles()}
    needed[" algorithm.options.reward_components=[a,b] reward.path=my_reward.py"] = isinstance(preset.estimator, GDPO)
    more = "".join(text for text, due in needed.items() if due)
    small = " ".join(f"{k}={v}" for k, v in recommended(preset.name).items())
    data = "model.path=DIR data.train_files=[FILE]"
    return (
        f"verl train {data} algorithm.name={preset.name}{more}",
        f"verl train recipe=quickstart {data} data.eval_files=[FILE] {small}",
    )


def fixes(preset: Preset) -> str:
    """The axes of a preset as a table, and what else differs from the defaults."""
    group, chosen = preset.group, preset.sample_filter is not None
    answers = f"at least {group.least} answers per prompt" if group.least > 1 else "any number of answers per prompt"
    kl = [f"in the loss, {k.form}, {k.coef:g}" for k in (preset.kl_loss,) if k]
    kl += [f"in the reward, {k.form}, {k.coef:g}" for k in (preset.kl_reward,) if k]
    c = preset.correction
    corrected = "none" if c is None else "bypass: the sampler is the old policy"
    if c is not None and c.form is not None:
        corrected = f"{c.form}, {c.level}, at most {c.high:g}"
    selection = "groups without spread are replaced" if preset.group_filter.filter_groups else "all"
    rows = [
        ("group", answers + (f", {group.baselines} greedy one as baseline" if group.baselines else "")),
        ("selection", "best and worst of each group" if chosen else selection),
        ("estimator", short(preset.estimator.fn)),
        ("loss", short(preset.loss.fn)),
        ("aggregation", preset.loss.aggregation),
        ("KL", "; ".join(kl) or "none"),
        ("correction", corrected),
        ("critic", "yes" if preset.critic else "no"),
    ]
    own = {k: v for k, v in altered_settings(preset).items() if k not in AXES}
    said = "Settings that differ from the defaults: " + ", ".join(f"`{k}` {v}" for k, v in own.items()) + "."
    return _table(("axis", "value"), rows) + "\n\n" + (said if own else "All other settings are at their defaults.")


def renewed(page: str, preset: Preset) -> str:
    """The page with the parts that the specs say."""
    page = _between(page, "## What the preset fixes\n\n", "\n\n## Run it", fixes(preset))
    return _between(page, "## Run it\n\n```text\n", "\n```", "\n".join(launch(preset)))


def renewed_index(page: str, titles: dict[str, str]) -> str:
    rows = [
        (f"[{titles[n]}]({n}.md)", f"`{n}`", short(p.estimator.fn), short(p.loss.fn), p.loss.aggregation, p.source)
        for n, p in PRESETS.items()
    ]
    head = ("card", "name", "estimator", "loss", "aggregation", "source")
    page = _between(page, "single ones.\n\n", "\n\n```", _table(head, rows))
    return _between(page, "<!-- settings -->\n\n", "\n\n<!-- end of settings -->", settings())


def settings() -> str:
    """Every setting with its meaning, its default and the algorithms that have it."""
    had = {n: p.settings() for n, p in PRESETS.items()}
    rows = []
    for key, option in knobs().items():
        values = {n: of[key] for n, of in had.items() if key in of}
        usual = Counter(map(str, values.values())).most_common(1)[0][0]
        of = ", ".join(f"`{n}`" for n in values) if len(values) < 9 else f"{len(values)} of them"
        of = "all" if len(values) == len(PRESETS) else of
        rows.append((f"`algorithm.{'options.' if option else ''}{key}`", MEANINGS.get(key, ""), usual, of))
    return _table(("key", "what", "default", "of"), rows)


def pages(folder: Path) -> dict[str, str]:
    """Every page by its file name, renewed."""
    out = {f"{n}.md": renewed((folder / f"{n}.md").read_text(), p) for n, p in PRESETS.items()}
    titles = {name.removesuffix(".md"): text.splitlines()[0].removeprefix("# ") for name, text in out.items()}
    return {**out, INDEX: renewed_index((folder / INDEX).read_text(), titles)}


def _between(text: str, start: str, end: str, new: str) -> str:
    found, n = re.subn(f"({re.escape(start)}).*?(?={re.escape(end)})", lambda m: m[1] + new, text, count=1, flags=re.S)
    assert n == 1, f"the page has no part between {start!r} and {end!r}"
    return found


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python bench/cards.py FOLDER", file=sys.stderr)
        return 2
    for name, text in pages(Path(argv[0])).items():
        (Path(argv[0]) / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
