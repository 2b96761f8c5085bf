"""A client of a predictor's application, without a port between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

from serving.predictor import Predictor
from serving.rest import application

T = TypeVar("T")


def over_http(predictor: Predictor, ask: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """What `ask` returns of a client of the predictor's application."""

    async def asking() -> T:
        transport = httpx.ASGITransport(application(predictor))
        async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=30) as client:
            return await ask(client)

    return asyncio.run(asking())
