"""What is shown as the consequence of what."""

from __future__ import annotations

import pytest

from torch_gradmon.analysis.diagnosis.findings import Diagnosis, Finding


@pytest.mark.parametrize(("outliers", "causes"), [(0.0, 2), (3.0, 1)])
def test_no_clip_causes_nothing_where_no_step_is_an_outlier(outliers: float, causes: int) -> None:
    absent = Finding("never-clipped", "info", "", (0, 99), {"outliers": outliers}, "", "", 5.0)
    plateau = Finding("loss-plateau", "info", "", (0, 99), {}, "", "", 1.0)
    assert len(list(Diagnosis((absent, plateau), (0, 99), {}).grouped())) == causes
