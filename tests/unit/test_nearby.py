"""Which modules of a folder seem to make a Celery app."""

from __future__ import annotations

from pathlib import Path

import pytest

from umt_durable.bridge.nearby import apps_near


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("shop.py", "from celery import Celery\napp = Celery('shop')\n", ["shop"]),
        ("shop.py", "import celery\napp: celery.Celery = celery.Celery(\n    'shop')\n", ["shop"]),
        ("shop/celery.py", "app = Celery('shop')\n", ["shop"]),
        ("shop/__init__.py", "app = Celery('shop')\n", ["shop"]),
        ("shop/work.py", "app = Celery('shop')\n", ["shop.work"]),
        ("shop.py", "from umt_durable import app\n", []),
        ("shop.py", "# app = Celery('shop')\n", []),
        ("test_shop.py", "def make():\n    app = Celery('shop')\n", []),
        (".venv/shop.py", "app = Celery('shop')\n", []),
        ("a/b/shop.py", "app = Celery('shop')\n", []),
    ],
)
def test_a_module_whose_text_makes_an_app_is_named_as_celery_takes_it(
    tmp_path: Path, path: str, text: str, named: list[str]
) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)

    assert apps_near(tmp_path) == named
