import json

import torch
from torch.utils.data import Dataset


class Reviews(Dataset):
    def __init__(self, path, length=256):
        with open(path) as file:
            self.rows = [json.loads(line) for line in file]
        self.length = length

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        tokens = (self.rows[index]["tokens"] + [0] * self.length)[: self.length]
        return torch.tensor(tokens), self.rows[index]["label"]
