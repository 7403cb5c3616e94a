"""Measuring attention on this machine: named shapes, peers beside us, distance to the limit."""

from __future__ import annotations
