"""Text models of checkpoints with a vision model, whose tensors are not read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.spec.model import read_spec
from models.weights.checkpoint import check_checkpoint
from tests.support.local_model import LocalModel
from tests.support.tiny_models import prompts, text_config

_SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_heads": 2, "intermediate_size": 24,
          "num_hidden_layers": 1, "depth": 1, "patch_size": 4, "image_size": 8}  # fmt: skip
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4_text": ("Llama4", {"vision_output_dim": 16, "projector_input_dim": 16,
                               "projector_output_dim": 16, "pixel_shuffle_ratio": 0.5}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {"out_hidden_size": 48, "num_position_embeddings": 16}),
}  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", VISION)
def test_logits_equal_those_of_the_whole_model(tmp_path: Path, family: str, tied: bool) -> None:
    import transformers

    name, sizes = VISION[family]
    config = getattr(transformers, f"{name}Config")(
        text_config=text_config(family, tie_word_embeddings=tied).to_dict(),
        vision_config={**_SIZES, **sizes},
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    model.set_experts_implementation("eager")
    model.save_pretrained(tmp_path)
    assert check_checkpoint(tmp_path).architecture == family
    assert read_spec(tmp_path).tie_word_embeddings is tied
    (ids,) = prompts(3, [40])
    expected = model(input_ids=torch.tensor([ids])).logits[0]
    found = LocalModel.load(tmp_path, dtype="float32").forward([ids])[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1
