"""The models of the demos: a tiny Qwen2 with a character tokenizer, warm-started so that RL has something to improve.

The warm start of the demo trains on sums, but most of its answers are one of the operands. The model learns all three
answers and samples the right one about as often as it was shown; only the reward tells them apart. Demos with an
environment are warm-started on episodes (`demo.py`).

`python -m asyncrl.data.tiny_model DEMO PATH SEED` makes one in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from random import Random

import structlog
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl.data.demo import DEMOS, SUMS, EpisodeDemo, Span, check_demo, sums
from asyncrl.errors import ConfigError

log = structlog.get_logger()

SPECIAL = ["<pad>", "<eos>", "<unk>"]
CHARACTERS = "0123456789+-*= ?<>"
WINDOW_TOKENS = 64
RIGHT_SHARE = 0.25
"""Fraction of the warm start's answers that are the sum."""
STEPS = 200
BATCH, EPISODES = 256, 128
"""Sums, or episodes, of a step."""
LR = 3e-3
NO_LABEL = -100
"""Label of tokens that are not trained."""


def make_tiny_model(path: Path, *, demo: str = SUMS, seed: int = 0, steps: int | None = None) -> None:
    """Writes the folder of a demo's model (Hugging Face format) atomically; the same model for the same seed and
    machine. `demo` is SUMS or one of DEMOS.

    Raises ConfigError when the path exists: nothing is ever deleted.
    """
    path = path.absolute()
    check_demo(demo)
    check_model_folder(path)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model()
    if demo == SUMS:
        shown = {"accuracy": warm_start(model, tokenizer, steps=STEPS if steps is None else steps, seed=seed)}
    else:
        shown = {"loss": warm_start_on_episodes(model, tokenizer, DEMOS[demo], steps=steps, seed=seed)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        disable_progress_bar()
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shown = {name: round(value, 3) for name, value in shown.items()}
    log.info("tiny model made", path=str(path), parameters=model.num_parameters(), **shown)


def check_model_folder(path: Path) -> None:
    """Raises ConfigError unless the path does not exist or is an empty folder."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path}: exists; give another path, or delete it yourself to have the model made again")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=WINDOW_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def make_model() -> Qwen2ForCausalLM:
    """The untrained model."""
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=WINDOW_TOKENS,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<eos>"),
        pad_token_id=SPECIAL.index("<pad>"),
    )
    return Qwen2ForCausalLM(config)


def warm_start(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int) -> float:
    """Trains on right and wrong answers; returns the mean probability of the right answer over all prompts."""
    prompts, *answers = _encode(tokenizer)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, betas=(0.9, 0.98))
    choices = torch.stack(answers)
    shares = torch.tensor([RIGHT_SHARE, (1 - RIGHT_SHARE) / 2, (1 - RIGHT_SHARE) / 2])
    for step in range(steps):
        set_lr(optimizer, step, steps)
        rows = torch.randint(len(prompts), (BATCH,), generator=generator)
        kinds = torch.multinomial(shares, BATCH, replacement=True, generator=generator)
        loss = -_answer_logprobs(model, prompts[rows], choices[kinds, rows]).mean()
        update(model, optimizer, loss)
    with torch.no_grad():
        return _answer_logprobs(model, prompts, answers[0]).sum(dim=1).exp().mean().item()


def warm_start_on_episodes(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, demo: EpisodeDemo, *, steps: int | None, seed: int
) -> float:
    """Trains on drawn episodes, on the policy's text in them; returns the loss of the last batch."""
    random = Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, betas=(0.9, 0.98))
    steps, loss = demo.steps if steps is None else steps, torch.zeros(())
    for step in range(steps):
        set_lr(optimizer, step, steps)
        tokens, labels = _padded([demo.episode(random) for _ in range(EPISODES)], tokenizer)
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=NO_LABEL)
        update(model, optimizer, loss)
    return loss.item()


def set_lr(optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    """Sets the learning rate of a step of the warm start."""
    for group in optimizer.param_groups:
        group["lr"] = LR * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / steps)


def update(model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Makes an optimizer step."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _padded(episodes: list[list[Span]], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Tokens and labels [episodes, tokens]; only the policy's text has labels."""
    rows: list[list[tuple[int, int]]] = []
    for spans in episodes:
        parts = [(tokenizer(text)["input_ids"], said) for text, said in spans]
        rows.append([(token, token if said else NO_LABEL) for tokens, said in parts for token in tokens])
    longest = max(map(len, rows))
    padded = torch.tensor([row + [(SPECIAL.index("<pad>"), NO_LABEL)] * (longest - len(row)) for row in rows])
    return padded[..., 0], padded[..., 1]


def _encode(tokenizer: PreTrainedTokenizerFast) -> list[Tensor]:
    """Tokens of all prompts, right answers, first operands and second operands, each [sums, tokens]."""
    rows = sums()
    texts = [
        [prompt for prompt, *_ in rows],
        [f"{answer}<eos>" for _, answer, *_ in rows],
        [f"{a:02d}<eos>" for _, _, a, _ in rows],
        [f"{b:02d}<eos>" for _, _, _, b in rows],
    ]
    return [torch.tensor(tokenizer(column)["input_ids"]) for column in texts]


def _answer_logprobs(model: Qwen2ForCausalLM, prompts: Tensor, answers: Tensor) -> Tensor:
    """Log-probs [rows, answer tokens] of the answers."""
    tokens = torch.cat([prompts, answers], dim=1)
    logits = model(input_ids=tokens[:, :-1]).logits[:, prompts.shape[1] - 1 :]
    losses = cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none")
    return -losses.view_as(answers)


def main() -> None:
    """Makes the model; an error is one line on standard error."""
    demo, path, seed = sys.argv[1:]
    try:
        make_tiny_model(Path(path), demo=demo, seed=int(seed))
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
