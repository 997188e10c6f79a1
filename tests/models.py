"""Tiny checkpoints with a byte-level tokenizer and a chat template, made on the spot."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from recipes.tiny_moe.make_model import VOCAB_SIZE
from recipes.tiny_moe.make_model import tokenizer as byte_tokenizer


def tiny_dense(path: Path, seed: int = 0) -> Path:
    """Write a two-layer Llama with tied embeddings to ``path`` and return it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
    )
    return _save(LlamaForCausalLM(config), path)


def tiny_moe(path: Path, seed: int = 0) -> Path:
    """Write a two-layer Qwen3-MoE (four experts, two per token) to ``path`` and return it."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            # A router drawn at 0.02 scores every expert alike, and then rounding picks them.
            torch.nn.init.normal_(parameter, std=0.5)
    return _save(model, path)


def _save(model: PreTrainedModel, path: Path) -> Path:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "norm" not in name and not name.endswith("mlp.gate.weight"):
            # Draws at 0.02 make all tokens almost equally likely, and mistakes invisible.
            torch.nn.init.normal_(parameter, std=0.08)
    tokens = byte_tokenizer()
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokens.eos_token_id
        config.pad_token_id = tokens.pad_token_id
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    return path
