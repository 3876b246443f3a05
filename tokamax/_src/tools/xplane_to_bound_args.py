"""`tokamax bound-args` as a script.

python tokamax/_src/tools/xplane_to_bound_args.py --xplane_file=model.xplane.pb --output_file=bound_args.json
"""

import sys

from tokamax._src.tools import cli

if __name__ == "__main__":
    sys.exit(cli.main(["bound-args", *sys.argv[1:]]))
