"""Checks an installation and a running engine, and says what mends what is wrong."""

from flashmoa.doctor.findings import Finding, Level
from flashmoa.doctor.installation import check_installation
from flashmoa.doctor.running import Asked, check_engine

__all__ = ["Asked", "Finding", "Level", "check_engine", "check_installation"]
