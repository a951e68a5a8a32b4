"""Check an installation, a running engine or a run's prefixes; name a remedy for each problem."""

from flashmoa.doctor.engine import EngineToCheck, check_engine
from flashmoa.doctor.findings import Finding, Level
from flashmoa.doctor.installation import check_installation
from flashmoa.doctor.prefixes import check_prefixes

__all__ = [
    "EngineToCheck",
    "Finding",
    "Level",
    "check_engine",
    "check_installation",
    "check_prefixes",
]
