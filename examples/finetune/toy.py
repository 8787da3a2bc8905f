"""Writes a small Llama of random weights with a tokenizer of bytes, and data, to try the scripts of this folder.

python examples/finetune/toy.py toy
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

TEXT = "Parameters move between the device, host memory and NVMe while the model computes. "
END = "<end>"


def write_model(folder: Path, layers: int, width: int, vocabulary: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({END: 0} | {char: n for n, char in enumerate(alphabet, 1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, padding_side="left"
    ).save_pretrained(folder)
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 17}
    set_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **shape, **heads, **ends)).save_pretrained(folder)


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="gets model/, texts.jsonl, pairs.jsonl and prompts.jsonl")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=257, help="tokens that the model knows, at least 257")
    args = parser.parse_args()
    write_model(args.folder / "model", args.layers, args.width, args.vocabulary)
    texts = [(2 * TEXT)[start : start + 64] for start in range(len(TEXT))]
    write_rows(args.folder / "texts.jsonl", [{"text": text} for text in texts])
    pairs = [{"prompt": text[:16], "chosen": text[16:32], "rejected": text[31:15:-1]} for text in texts]
    write_rows(args.folder / "pairs.jsonl", pairs)
    write_rows(args.folder / "prompts.jsonl", [{"prompt": text[:16]} for text in texts])


if __name__ == "__main__":
    main()
