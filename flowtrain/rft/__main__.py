"""The command:  python -m flowtrain.rft --config configs/quickstart.toml --run.dir runs/warm"""

from flowtrain.config.command import GOES_ON, run_command
from flowtrain.rft.loop import rft
from flowtrain.training.world import end_process

if __name__ == "__main__":
    end_process(run_command("flowtrain.rft", rft, goes_on=GOES_ON))
