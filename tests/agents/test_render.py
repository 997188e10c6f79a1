"""Rendering: the template's text exactly once, and sampled ids untouched."""

import pytest

from molt.agents import Renderer
from tests.models import byte_tokenizer

QUESTION = [{"role": "user", "content": "2+2?"}]
REPLY = [{"role": "user", "content": "sure?"}]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(byte_tokenizer(), "tiny")


def encode(renderer: Renderer, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def test_prompt_ends_where_the_policy_takes_over(renderer):
    expected = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.prompt(QUESTION) == encode(renderer, expected)


def test_end_of_turn_is_the_templates(renderer):
    assert [renderer.end_of_turn] == encode(renderer, "<|im_end|>")


def test_glue_leaves_out_an_end_of_turn_that_was_sampled(renderer):
    glue = "<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    byte = encode(renderer, "4")[0]
    assert renderer.continuation(REPLY, last_token=byte) == encode(renderer, glue)
    assert renderer.continuation(REPLY, renderer.end_of_turn) == encode(renderer, glue)[1:]


def test_pieces_make_the_full_render(renderer):
    messages = [*QUESTION, {"role": "assistant", "content": "4"}, *REPLY]
    full = renderer.prompt(messages)
    sampled = [*encode(renderer, "4"), renderer.end_of_turn]
    glue = renderer.continuation(REPLY, sampled[-1])
    assert renderer.prompt(QUESTION) + sampled + glue == full


def test_assistant_spans_are_contents_and_ends_of_turns(renderer):
    answer, second = ({"role": "assistant", "content": text} for text in ("4", "yes"))
    ids, mask = renderer.assistant_spans([*QUESTION, answer, *REPLY, second])
    assert ids == renderer.prompt([*QUESTION, answer, *REPLY]) + encode(renderer, "yes<|im_end|>")
    actions = [token for token, action in zip(ids, mask, strict=True) if action]
    assert actions == encode(renderer, "4<|im_end|>yes<|im_end|>")


def test_spans_need_a_question_and_an_answer(renderer):
    with pytest.raises(ValueError, match="needs a question and an answer"):
        renderer.assistant_spans(QUESTION)


def test_a_missing_template_names_the_model():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="model=some/folder has no chat template"):
        Renderer(tokenizer, "some/folder")


def test_without_an_end_in_the_template_the_end_of_sequence_is_one():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert Renderer(tokenizer, "plain").end_of_turn == tokenizer.eos_token_id
