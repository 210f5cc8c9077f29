"""Tiny tokenizers for tests, trained on the spot and written as Hugging Face folders."""

import json
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Is the review positive or negative? The answer is positive.",
    "yes no maybe good bad neutral, one two three four five",
    "größer, naïve, 你好世界, 😀 emoji and\n\nnew lines\tand tabs",
] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS = "<|im_end|>"


def write_byte_level(folder: Path, **config: object) -> Path:
    """A byte-level BPE with ChatML, as Qwen has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _write(folder, tokenizer, {"eos_token": EOS, "chat_template": CHATML, **config})


def write_sentencepiece_like(folder: Path, **config: object) -> Path:
    """A BPE with byte fallback and word starts as U+2581, as Mixtral has it."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    ascii_corpus = [text for text in CORPUS if text.isascii()]
    tokenizer.train_from_iterator(ascii_corpus, trainer)
    tree = json.loads(tokenizer.to_str())
    vocab = tree["model"]["vocab"]
    for token in byte_tokens:
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return _write(folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", **config})


def _write(folder: Path, tokenizer: Tokenizer, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
