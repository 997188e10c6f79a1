"""Write an untrained model to build/tiny_moe: ``python -m recipes.tiny_moe.make_model``.

It is a mixture of experts, Qwen3-MoE: 8 experts of which a token uses 2, 1.9 million parameters.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

FOLDER = Path("build/tiny_moe")
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant", "tool")
VOCAB_SIZE = 320  # a multiple of 64, as engines like it; the last rows are no token
CONTEXT = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, each mark of the template and each role."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    core.add_tokens([AddedToken(t, normalized=False) for t in ROLES])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def config(tokens: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """Return the architecture."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )


def write(folder: Path) -> None:
    """Write model and tokenizer; the weights are the same ones every time."""
    tokens = tokenizer()
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config(tokens)).save_pretrained(folder)
    tokens.save_pretrained(folder)


if __name__ == "__main__":
    write(FOLDER)
