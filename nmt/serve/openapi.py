"""The interface as an OpenAPI document, written by hand beside the routes; a test compares both."""

from typing import Any

from nmt.serve.limits import ServeLimits


def make_openapi(limits: ServeLimits) -> dict[str, Any]:
    return {"openapi": "3.1.0", "info": {"title": "nmt-serve", "version": "1"}, "paths": {}}
