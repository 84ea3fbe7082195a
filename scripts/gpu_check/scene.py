"""What all checks share: the program, the device, the models made for this run, and PyTorch where it is."""

from . import pytorch, weights
from .findings import NotMeasured
from .texts import Texts


class Model:
    """A model that was made here."""

    def __init__(self, folder, shape, seed):
        self.folder, self.shape = folder, shape
        self.texts = Texts(weights.write(folder, shape, seed), shape, seed)


class Scene:
    """Of one run. `uuid` is the device's name in replies: `cpu`, or the card's."""

    def __init__(self, asked, sconce, folder):
        self.asked, self.sconce, self.folder = asked, sconce, folder
        self.host = sconce.devices().report()
        self.on_gpu = asked.device != "cpu"
        self.card = self._card() if self.on_gpu else None
        self.uuid = self.card["uuid"] if self.card else "cpu"
        self.reference = asked.reference or ("torch" if pytorch.torch else "none")
        self.models = []

    def _card(self):
        cards, asked = self.host["nvidia"]["gpus"], self.asked.device
        for at, card in enumerate(cards):
            if asked == f"cuda:{at}" or card["uuid"].startswith(asked):
                return card
        why = self.host["nvidia"]["unknown"] or f"there are {len(cards)} cards"
        raise SystemExit(f"gpu-check: no {asked} here: {why}. --device cpu checks what needs none")

    def needs_gpu(self):
        """Raises where none is checked."""
        if not self.on_gpu:
            raise NotMeasured("no GPU")

    @property
    def torch(self):
        """PyTorch; raises where it is not here, or not to be used."""
        if self.reference != "torch":
            raise NotMeasured("without PyTorch")
        return pytorch.torch

    @property
    def torch_device(self):
        """The same device in PyTorch, which numbers cards in another order where it is not told to."""
        torch = self.torch
        if not self.on_gpu:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise NotMeasured("this PyTorch sees no GPU")
        for at in range(torch.cuda.device_count()):
            name = getattr(torch.cuda.get_device_properties(at), "uuid", None)
            if name is not None and str(name).lower() in self.uuid.lower():
                return torch.device("cuda", at)
        return torch.device("cuda", 0)

    def make(self, shape):
        """Makes the model of a shape."""
        model = Model(self.folder / shape.name, shape, self.asked.seed)
        self.models.append(model)
        return model

    def embed(self, model, lines, settings=(), **more):
        """Runs lines through the device in question."""
        return self.sconce.embed(lines, model.folder, self.uuid, settings, **more)
