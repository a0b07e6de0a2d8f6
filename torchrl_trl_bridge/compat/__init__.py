"""Versions: what is installed and supported, and what differs between releases of the libraries, one file per library.

Importing this loads no library. `check` runs by itself when the first public name of the package is loaded.
"""

from torchrl_trl_bridge.compat.report import report
from torchrl_trl_bridge.compat.versions import check, versions

__all__ = ["check", "report", "versions"]
