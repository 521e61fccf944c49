"""Opacus' side of run.py: a GPT-2 of the same shape out of layers that it supports.

A variant is "lora" or "full", then ":plain", ":hooks" or ":ghost". Ghost clipping refuses tied weights, so its full
model has an output projection of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from opacus import PrivacyEngine
from protocol import BATCH, HEADS, LAYERS, RANK, TOKENS, VOCABULARY, WIDTH, batch_of_sequences, serve
from torch import nn


class Lora(nn.Module):
    """A frozen dense layer with a trainable low-rank update."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, projection: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query, self.value = projection(), projection()
        self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        heads = [
            layer(h).reshape(*h.shape[:2], HEADS, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(h.shape))
        return x + self.dense(self.norms[1](x))


class Gpt2(nn.Module):
    def __init__(self, lora: bool, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(Lora if lora else lambda: nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS))
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.logits.weight = self.tokens.weight
        if lora:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".down." in name or ".up." in name)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # Opacus needs every unit's positions: one row for all of them has a gradient of batch size 1.
        x = self.tokens(ids) + self.positions(torch.arange(TOKENS).repeat(len(ids), 1))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


class SequenceLoss(nn.Module):
    """The mean over the tokens of each sequence, and over the sequences unless Opacus sets `reduction` to "none"."""

    reduction = "mean"

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
        return losses if self.reduction == "none" else losses.mean()


def make(variant: str) -> Callable[[], float]:
    train, kind = variant.split(":")
    model = Gpt2(lora=train == "lora", tied=kind != "ghost")
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    criterion = SequenceLoss()
    ids, targets = (torch.from_numpy(each).contiguous() for each in batch_of_sequences())
    if kind != "plain":
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, targets), batch_size=BATCH)
        private = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            criterion=criterion,
            noise_multiplier=100.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=kind,
        )
        model, optimizer = private[:2]
        criterion = private[2] if kind == "ghost" else criterion

    def step() -> float:
        optimizer.zero_grad()
        loss = criterion(model(ids), targets)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


if __name__ == "__main__":
    serve(make, sys.argv[1:])
