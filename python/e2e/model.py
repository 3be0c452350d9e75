"""Writes the model of the end-to-end tests: a Llama of two layers with random weights, and its tokenizer.

    target/engines/venv/bin/python python/e2e/model.py FOLDER [--seed N]

The same seed produces the same bytes. Another seed produces another model of the same shape with the same tokenizer: a
store whose keys do not include the model cannot tell them apart.

The shape is small and can be split between two ranks: 4 heads for attention, 2 for keys and values. The weights are
larger than those of a real model (`initializer_range`), so that a wrong block of the cache changes the next token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TOKENS_MAX = 8192
"""Number of positions: enough for several prompts of 1,500 tokens in one conversation."""

VOCABULARY = 1024
"""Rows of the embedding. The tokenizer has fewer tokens, so that every token has a row."""

SENTENCE = "the quick brown fox jumps over the lazy dog and the tide comes in and the tide goes out "


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer for any text: its alphabet has all bytes. It is trained on a fixed sentence, so that it is
    reproducible."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCE * 50], trainer)
    assert tokenizer.get_vocab_size() <= VOCABULARY
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=TOKENS_MAX
    )
    fast.save_pretrained(folder)


def write_weights(folder: Path, seed: int) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=TOKENS_MAX,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.25,
        # With bfloat16, vLLM crashes if the CPU has AMX and the machine does not allow its use.
        dtype="float32",
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)


def write(folder: Path, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_weights(folder, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights [default: %(default)s]")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.seed)
    print(f"{arguments.folder}: seed {arguments.seed}, {TOKENS_MAX} positions")


if __name__ == "__main__":
    main()
