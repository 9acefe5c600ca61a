"""Copies of the model in a script that nobody has changed: at which steps they are looked at."""

from __future__ import annotations

from pathlib import Path

from healthcheck.assembly import open_session
from healthcheck.instrument.script import ScriptTrainer

AVERAGED = """
import copy, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
average = copy.deepcopy(model).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(230):
    x = torch.randn(16, 4)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for one, other in zip(average.parameters(), model.parameters()):
            one.lerp_(other, 0.05)
"""


def test_a_known_copy_is_looked_at_also_where_the_process_is_searched_for_more(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(AVERAGED, encoding="utf-8")
    session = open_session(target="train.py", rules="healthcheck:recommended", console=False, record=False)
    assert ScriptTrainer(session).run(str(script), []) == 0
    looked = [step for step, _ in session.history("copies.rewritten", 100)]
    assert looked == list(range(40, 201, 20)), "the search for copies at step 200 is no reason to leave the look out"
    assert session.alerts == []
