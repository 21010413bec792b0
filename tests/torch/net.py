"""A network for tests."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Net"]


class Net(nn.Module):
    """With tied weights, buffers and a submodule whose loading torch customizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Any) -> Any:
        return self.out(self.norm(self.layer(self.embed(x))))
