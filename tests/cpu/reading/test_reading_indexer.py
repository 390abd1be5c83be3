"""reader-v4's indexer is trained: with a random one the same model no longer finds what it is asked for."""

import shutil
from pathlib import Path

import torch
from readers import Reader, each_kind, examination

from longread.cli.checkpoint import locate
from longread.measure.reading import KINDS
from longread.spec.config_json import read_config, spec_from_config
from longread.weights.export import write_checkpoint
from longread.weights.reader import Checkpoint

LINES = 460  # about 8,000 tokens
QUESTIONS = 16
FOUND = tuple(kind for kind in KINDS if kind != "absent")  # whoever finds nothing is right about what is not there


def with_a_random_indexer(folder: Path) -> Path:
    """A copy of reader-v4 whose indexer's matrices are noise of the same size; all other tensors are the same."""
    source = locate("reader-v4")
    config = read_config(source)
    tensors = Checkpoint.open(source).load(spec_from_config(config), torch.float32)
    noise = torch.Generator().manual_seed(1)
    replaced = [name for name, tensor in tensors.items() if ".indexer." in name and tensor.ndim == 2]
    assert len(replaced) == 3 * 5  # layers with an indexer; projections, and the compressor's with its positions
    for name in replaced:
        old = tensors[name]
        tensors[name] = torch.randn(old.shape, generator=noise) * old.std()
    write_checkpoint(folder, config, tensors)
    shutil.copy(source / "tokenizer.json", folder)
    return folder


def test_what_is_asked_is_found_by_the_indexer(tmp_path: Path) -> None:
    document = examination(20, LINES, "en", "contract")
    questions = each_kind(document, QUESTIONS, FOUND)
    assert len(questions) == QUESTIONS
    intact = Reader.open("reader-v4", max_model_len=8704)
    entries = len(intact.prompt(document.text)) / 4  # a row every 4 tokens
    assert intact.spec.indexer is not None and intact.spec.indexer.top_k / entries < 0.07
    wrong = intact.wrong(document, questions)
    assert len(wrong) <= QUESTIONS // 10, "\n".join(wrong)
    blind = Reader.open("reader-v4", with_a_random_indexer(tmp_path), max_model_len=8704)
    assert len(blind.wrong(document, questions)) > QUESTIONS / 2
