"""Templates that loop, recurse, grow or compute without end: one line, wherever they are rendered."""

from __future__ import annotations

import threading
import time

import pytest
from test_bridge_templates import SOURCES
from test_chat import CHATML, tokenizer_of

from verl.chat import limits
from verl.chat.limits import TemplateOverrun, refuse_powers
from verl.chat.load import require_chat_template
from verl.chat.template import Renderer, RenderError, audit_template
from verl.rollout.server.requests import ApiError, ChatBody
from verl.rollout.server.texts import Texts

ASKED = [{"role": "user", "content": "Hi"}]
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
GROWING = "{% set ns = namespace(s='x' * 1000) %}{% for i in range(19) %}{% set ns.s = ns.s + ns.s %}{% endfor %}"


def with_template(template: str):
    import copy

    tokenizer = copy.copy(tokenizer_of("chatml"))
    tokenizer.chat_template = template + CHATML
    return tokenizer


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_an_end_is_one_line_and_what_follows_is_not_hit(name, monkeypatch):
    monkeypatch.setattr(limits, "RENDER_SECONDS", 0.2)
    began, endless = time.process_time(), with_template(ENDLESS[name])
    for ask in (audit_template, lambda t: Renderer(t).ids(ASKED, prompt=True)):
        with pytest.raises(TemplateOverrun, match=r"takes more than 0 s.*model.chat_template"):
            ask(endless)
    assert time.process_time() - began < 20
    audit_template(tokenizer_of("chatml"))


def test_each_thread_has_its_own_time(monkeypatch):
    monkeypatch.setattr(limits, "RENDER_SECONDS", 0.2)
    found: list[object] = []

    def render(template: str) -> None:
        try:
            found.append(len(Renderer(with_template(template)).text(ASKED, prompt=True)))
        except TemplateOverrun as e:
            found.append(type(e))

    threads = [threading.Thread(target=render, args=(t,)) for t in ("", ENDLESS["loops"], "")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3 and found.count(TemplateOverrun) == 1


def test_a_template_that_grows_is_one_line(monkeypatch):
    monkeypatch.setattr(limits, "RENDER_BYTES", 1 << 28)
    with pytest.raises(TemplateOverrun, match="of memory"):
        Renderer(with_template(GROWING + ENDLESS["loops"])).text(ASKED, prompt=True)


def test_powers_are_refused_and_arguments_by_name_are_not():
    for template in ("{{ 10**10**9 }}", "{% set x = n ** 2 %}", "{{ (3)**n }}"):
        with pytest.raises(ValueError, match=r"power .*model.chat_template"):
            refuse_powers(template)
    with pytest.raises(ValueError, match="power"):
        require_chat_template(with_template("{{ 2 ** 3 }}"), "m")
    for template in ("{{ dict(a=1, **b) }}{{ dict(**b) }} 2 ** 3", "{{ broken", *SOURCES.values()):
        refuse_powers(template)


def test_what_goes_wrong_in_a_template_is_a_refusal():
    for template in ("{{ 1 / 0 }}", "{{ range(10000000) }}", "{{ [][3].x }}", "{{ none + 1 }}"):
        with pytest.raises(RenderError, match="refuses messages"):
            Renderer(with_template(template)).text(ASKED, prompt=True)


def test_arguments_of_a_request_do_not_hang_the_server(monkeypatch):
    monkeypatch.setattr(limits, "RENDER_SECONDS", 0.2)
    loops = "{% for a in range(n) %}{% for b in range(n) %}{% for c in range(n) %}{% endfor %}{% endfor %}{% endfor %}"
    tokenizer = with_template("{% if n is defined %}" + loops + "{{ 'x' * n }}{% endif %}")
    texts = Texts(tokenizer=tokenizer, decode=tokenizer.decode, spell=tokenizer.decode, audit=audit_template(tokenizer))

    def render(**kwargs: object) -> int:
        body = ChatBody(model="m", messages=list(ASKED), chat_template_kwargs=kwargs)
        return len(texts.render(body, 1000).ids)

    assert render() and render(n=2)
    many = [(99_999, "takes more than"), (10**7, "refuses messages"), (10**400, "beyond"), ({"a": [1e12]}, "beyond")]
    for n, why in many:
        with pytest.raises(ApiError, match=why) as refused:
            render(n=n)
        assert refused.value.status == 400
