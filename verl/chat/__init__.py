"""Chat templates: tokenizers, prompts, the audit of a template, conversations with loss masks. No torch at import."""

from verl.chat.conversation import NO_TURN_END, Rendered, TurnEnd, turn_end
from verl.chat.load import load_tokenizer, require_chat_template
from verl.chat.template import TemplateAudit, audit_template, render_prompt

__all__ = [
    "NO_TURN_END",
    "Rendered",
    "TemplateAudit",
    "TurnEnd",
    "audit_template",
    "load_tokenizer",
    "render_prompt",
    "require_chat_template",
    "turn_end",
]
