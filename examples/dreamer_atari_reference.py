"""Dreamer on ALE/Breakout-v5 with the packaged preset; --help lists what can be changed."""

from _runner import reference

main = reference("dreamer/breakout_atari")

if __name__ == "__main__":
    main()
