"""Load the tokenizer of a model folder, with its own chat template or a given one."""

from __future__ import annotations

from pathlib import Path

from verl.chat.limits import refuse_powers
from verl.chat.template import Tokenizer, one_line
from verl.errors import Refused


def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, chat_template_file: str | None = None
) -> Tokenizer:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise Refused(
            f"model.path={str(path)!r} is not a folder. Fix: give a local Hugging Face folder"
            " (`hf download NAME --local-dir DIR` makes one)"
        )
    from transformers import AutoTokenizer  # takes seconds and pulls torch in

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as exc:
        found = ", ".join(sorted(p.name for p in folder.iterdir() if "token" in p.name or "vocab" in p.name))
        raise Refused(
            f"model.path={str(path)!r} has no tokenizer that can be loaded (tokenizer files there: {found or 'none'};"
            f" {type(exc).__name__}: {one_line(exc)}). Fix: copy tokenizer.json and tokenizer_config.json of the model"
            " into the folder, or set model.tokenizer_path"
        ) from exc
    if chat_template_file is not None:
        try:
            tokenizer.chat_template = Path(chat_template_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise Refused(f"model.chat_template={chat_template_file!r} cannot be read: {one_line(exc)}") from exc
    return tokenizer


def require_chat_template(tokenizer: Tokenizer, path: str | Path) -> None:
    if not tokenizer.chat_template:
        raise Refused(
            f"the tokenizer of {str(path)!r} has no chat template, so messages cannot become a prompt."
            " Fix: model.chat_template=FILE (a Jinja file), or use an instruction-tuned model"
        )
    refuse_powers(str(tokenizer.chat_template))
