"""Passes through a network: which layers are read, what a forward pass records, and where gradients go on their way back."""

from __future__ import annotations

__all__: list[str] = []
