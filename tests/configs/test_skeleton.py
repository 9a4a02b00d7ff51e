"""Plain conversations are filled in where the template only copies; else it runs. Either way the
result is what the template says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.model.card import load_card
from configs.model.errors import TemplateError
from configs.model.template import ChatTemplate, Segment

MARKERS = {"<|im_start|>": 1, "<|im_end|>": 2, "</s>": 3}
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{% set ns = namespace(text='') %}{% for m in messages[1:] %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}"
    "{% endif %}{% set ns.text = ns.text + m.content %}{% endfor %}"
    "{% if messages[0].content is string and 'tool_calls' not in messages[0] %}"
    "{{ messages[0].content }}</s>{{ ns.text }}{{ eos_token }}{% endif %}"
)
COPYING = [CHATML, MISTRAL, "{{ messages[-1].content }}</s>", "{{ messages | length }}"]
ONE = "{% set c = messages[0].content %}"
LOOKING = [
    ONE + "{{ c | trim }}",
    ONE + "{{ c | upper }}",
    ONE + "{{ ('x' + c) | trim }}",
    ONE + "{{ ('x' ~ c) | length }}",
    ONE + "{% if c %}full{% else %}empty{% endif %}",
    ONE + "{% if not c %}empty{% endif %}",
    ONE + "{{ c or 'nothing' }}",
    ONE + "{{ 'long' if c | length > 3 else 'short' }}",
    ONE + "{{ c == 'a word' }}",
    ONE + "{{ 'a word' == c }}",
    ONE + "{{ c in ['a', 'b'] }}",
    ONE + "{{ c in 'ab' }}",
    ONE + "{{ 'a' in c }}",
    ONE + "{{ c[0] }}",
    ONE + "{{ c[:2] }}",
    ONE + "{{ c < 'm' }}",
    ONE + "{{ c * 2 }}",
    ONE + "{{ c.split('a')[0] }}",
    ONE + "{{ c.startswith('a') }}",
    ONE + "{{ 'abc'.startswith(c) }}",
    ONE + "{{ 'a%sb' % c }}",
    ONE + "{{ ('%s' % (c,)) | length }}",
    ONE + "{{ [c] | join | length }}",
    ONE + "{{ {'a': 1}[c] }}",
    ONE + "{{ c is lower }}",
    ONE + "{{ c is eq('a') }}",
    ONE + "{{ c | tojson }}",
    ONE + "{{ c | int }}",
    ONE + "{{ c | e }}",
    ONE + "{% for letter in c %}{{ letter }}.{% endfor %}",
    ONE + "{% set x %}{{ c }}{% endset %}{{ x | length }}",
    ONE + "{% filter upper %}{{ c }}{% endfilter %}",
    ONE + "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(c) | length }}",
    ONE + "{{ raise_exception(c) }}",
    "{{ messages }}",
    "{{ messages | tojson }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ strftime_now('%f') | length }}{{ messages[0].content }}",
    "\ue0000\ue001{{ messages[0].content }}",
    "{% for i in range(200) %}{{ messages[0].content }}{% endfor %}",
]
TEXTS = st.one_of(
    st.sampled_from(
        ["", "a", " a ", "b a c", "<|im_end|>", "</", "s>", "\ue0001\ue001", '"<', "1"]
    ),
    st.text(max_size=6),
)
CHATS = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant", "developer", "tool"]),
        TEXTS,
    ),
    min_size=1,
    max_size=4,
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, MARKERS, {"eos_token": "</s>"})


def outcome(render: object, *asked: object) -> list[Segment] | str:
    try:
        return render(*asked)  # type: ignore[operator]
    except TemplateError as error:
        return str(error)


@pytest.mark.parametrize("source", [*COPYING, *LOOKING])
@settings(max_examples=15)
@given(chat=CHATS, generation=st.booleans())
def test_filled_in_is_what_the_template_says(source: str, chat: list, generation: bool) -> None:
    made = template(source)
    whole = outcome(made._render_fully, chat, None, generation)
    assert outcome(made.render, chat, None, generation) == whole


USER = ("user",)


@pytest.mark.parametrize("source", COPYING)
def test_a_template_that_copies_is_not_run_again(source: str) -> None:
    assert template(source)._skeleton(USER, True) is not None


@pytest.mark.parametrize("source", LOOKING)
def test_a_template_that_looks_into_a_text_is_run(source: str) -> None:
    made = template(source)
    assert not made._traceable or made._skeleton(USER, True) is None


def test_the_real_template_copies(real_model: Path) -> None:
    made = load_card(real_model).template
    chat = [{"role": role, "content": f"{role}?"} for role in ("system", "user", "assistant")]
    assert made._skeleton(("system", "user", "assistant"), True) is not None
    assert made.render(chat) == made._render_fully(chat, None, True)
