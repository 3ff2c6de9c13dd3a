"""Serving: a model frozen by a plan, with FP8 weights quantized once, refreshed while it answers."""

from loka.core.records.latents import Latents
from loka.serve.freeze import freeze
from loka.serve.loading import load
from loka.serve.server import Answer, Server

__all__ = ["Answer", "Latents", "Server", "freeze", "load"]
