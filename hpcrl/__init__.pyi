from hpcrl.api import OpenRun as OpenRun
from hpcrl.api import init as init
from hpcrl.api import open as open
from hpcrl.api import run as run
from hpcrl.api import submit as submit

__version__: str
