"""The doctor: checks an installation and a running engine, and says how to fix what is wrong."""

from flashmoa.doctor.findings import Finding, Level
from flashmoa.doctor.installation import check_installation
from flashmoa.doctor.running import EngineToCheck, check_engine

__all__ = ["EngineToCheck", "Finding", "Level", "check_engine", "check_installation"]
