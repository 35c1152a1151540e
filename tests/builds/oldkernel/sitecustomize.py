"""Makes another build of kvfuse, for tests: its servers take the kernel for an older one.

KVFUSE_TEST_KERNEL holds the options of the direct driver that make it so, as JSON.
"""

import functools
import json
import os
import sys

if "daemon" in sys.orig_argv:
    from kvfuse.drivers.direct import session

    session.DirectOptions = functools.partial(
        session.DirectOptions, **json.loads(os.environ["KVFUSE_TEST_KERNEL"])
    )
