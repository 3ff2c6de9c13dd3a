import pytest
from graphed_cases import Fake, module


@pytest.fixture
def fake(monkeypatch):
    def install(model, optimizer):
        found = Fake(model, optimizer)
        monkeypatch.setattr(module, "record", found)
        monkeypatch.setattr(module, "has_graphs", lambda device: True)
        return found

    return install
