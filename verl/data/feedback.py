"""The prompt of a teacher that reads the feedback on an attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl.chat.bridge import PlainText, plain_text
from verl.chat.spelling import PLAIN_SPELLING, Spelling
from verl.chat.template import Renderer, Tokenizer, audit_template
from verl.data.formats import with_hint
from verl.types import Score, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Feedback:
    """Renders a teacher's prompt that contains feedback on an attempt: the task's prompt, followed by the feedback of
    the reward function or the environment. The feedback is encoded without control tokens, since it may quote the
    attempt or a tool."""

    plain: PlainText
    template_kwargs: Mapping[str, Any]
    longest: int
    spelling: Spelling = PLAIN_SPELLING

    def __call__(self, task: Task, attempt: Trajectory) -> Task:
        """Return the task with the ids of that prompt as `context_ids`. If there is no feedback, or the prompt is
        longer than `longest` tokens, the task is returned with `taught=False`."""
        if not (prefix := attempt.reward.feedback if isinstance(attempt.reward, Score) else ""):
            return replace(task, taught=False)
        messages = with_hint(tuple(map(dict, task.messages)), self.plain.marked(prefix))
        renderer = Renderer(self.plain.tokenizer, self.template_kwargs, task.tools, self.spelling)
        ids = self.plain.encode(renderer.text(messages, prompt=True))
        return replace(task, taught=False) if len(ids) > self.longest else replace(task, context_ids=ids)


def feedback_of(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any], longest: int) -> Feedback:
    """Return a `Feedback` for prompts of at most `longest` tokens, in the spelling of the tokenizer's chat template."""
    spelling = audit_template(tokenizer, template_kwargs).spelling if tokenizer.chat_template else PLAIN_SPELLING
    return Feedback(plain_text(tokenizer), template_kwargs, longest, spelling)
