"""Reads the index of the dataset, which one rank cannot in the first attempt, and trains as train.py does."""

import os


def read_index():
    faulty = os.environ["RANK"] in os.environ["FAULTY_RANKS"].split(",")
    if faulty and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ConnectionResetError(104, "Connection reset by peer: object store closed the stream")


if __name__ == "__main__":
    read_index()
    import train

    train.main()
