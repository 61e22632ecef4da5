"""The command:  python -m flowtrain.rft --config configs/quickstart.toml --run.dir runs/warm"""

from flowtrain.config.command import main

if __name__ == "__main__":
    main("flowtrain.rft", "flowtrain.rft.loop:rft")
