from __future__ import annotations

from celery.app.defaults import NAMESPACES, flatten

import celeryconfig


def chosen() -> dict[str, object]:
    return {name: value for name, value in vars(celeryconfig).items() if not name.startswith("_")}


def test_every_setting_is_one_of_celerys() -> None:
    assert set(chosen()) <= {name for name, _ in flatten(NAMESPACES)}


def test_it_names_no_server_so_that_the_embedded_pair_remains_the_default() -> None:
    assert not {"broker_url", "result_backend"} & set(chosen())
    assert not [name for name in chosen() if name.startswith("durable_")]


def test_i27_only_json_is_accepted() -> None:
    assert celeryconfig.accept_content == ["json"]
