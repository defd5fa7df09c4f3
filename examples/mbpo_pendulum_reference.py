"""MBPO on Pendulum-v1 with the packaged preset; --help lists what can be changed."""

from _runner import reference

main = reference("mbpo/pendulum")

if __name__ == "__main__":
    main()
