"""The datasets of the paper by name: what each is, where it is published, how the field splits and words it.

Facts only: nothing is read or fetched here. Split sizes are those of CoOp's split files (Zhou et al., 2022,
"Learning to Prompt for Vision-Language Models"); they add up to the whole sets. Templates are those
of its zero-shot CLIP. MD5 sums are torchvision 0.29's and, for FGVCAircraft, ImageNet-A and -R, those
on which several public loaders agree. No address could be tried when this was written.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from pathlib import Path

from drople.errors import unknown

DRIVE = "https://drive.google.com/uc?export=download&id="


@dataclass(frozen=True)
class File:
    """One file of a dataset at its publisher, and where it goes below the dataset's folder.

    Of an archive, the entries of its folder `inside` go to `place`; `nested` names an archive inside the
    archive. `gives` exist once it is in place. `tried` says whether the address was ever seen to answer.
    """

    urls: tuple[str, ...]
    filename: str
    gives: tuple[str, ...]
    md5: str | None = None
    inside: str = ""
    place: str = ""
    nested: str = ""
    optional: bool = False
    tried: bool = False


@dataclass(frozen=True)
class Dataset:
    """One dataset: `counts` are its train, val and test images; `folder` is its place under the data root.

    `needs` are the paths in that folder that a copy has to have; `pack` are the counts of the smaller pack of
    this project in the layout NAME/SPLIT/CLASS/FILE; `extra` are the counts of further test splits.
    """

    name: str
    title: str
    classes: int
    domain: str
    licence: str
    page: str
    counts: tuple[int, int, int]
    template: str
    folder: str = ""
    images: str = ""
    needs: tuple[str, ...] = ()
    split_file: str = ""
    files: tuple[File, ...] = ()
    fetchable: bool = True
    manual: str = ""
    aliases: tuple[str, ...] = ()
    pack: tuple[int, int, int] | None = None
    extra: tuple[tuple[str, int], ...] = ()
    kind: str = "benchmark"

    @property
    def tried(self) -> bool:
        """Whether every address of it was seen to answer."""
        return bool(self.files) and all(file.tried for file in self.files)


def published(url: str, *gives: str, md5: str | None = None, inside: str = "", place: str = "") -> File:
    return File((url,), url.rsplit("/", 1)[1], gives, md5, inside, place)


def split(filename: str, drive_id: str) -> File:
    """A split file of CoOp's authors. Without it a split is drawn, so a failure to get it is no error."""
    return File((DRIVE + drive_id,), filename, (filename,), optional=True)


VGG = "https://www.robots.ox.ac.uk/~vgg/data"
HUB = "https://huggingface.co/datasets"
BERKELEY = "https://people.eecs.berkeley.edu/~hendrycks"
IMAGENET_TERMS = "images from ImageNet and the web: non-commercial research and education; "

BENCHMARK = (
    Dataset(
        "imagenet",
        "ImageNet",
        1000,
        "objects",
        "non-commercial research and education, after registration",
        "https://image-net.org/download.php",
        # The field tests on the 50,000 official validation images. Here 50 a class of the 1,281,167 training
        # images are held out for validation, so that selection never sees test.
        (1_231_167, 50_000, 50_000),
        "a photo of a {}.",
        folder="imagenet",
        images="images",
        needs=("images/train", "images/val"),
        fetchable=False,
        manual="Register, accept the terms, download ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar. "
        "Unpack them into one folder for each WordNet id: images/train/n01440764/... and "
        "images/val/n01440764/...",
        aliases=("imagenet-1k", "imagenet1k", "ilsvrc2012"),
    ),
    Dataset(
        "caltech101",
        "Caltech101",
        100,
        "objects",
        "CC BY 4.0",
        "https://data.caltech.edu/records/mzrjq-6wc02",
        (4128, 1649, 2465),
        "a photo of a {}.",
        folder="caltech-101",
        images="101_ObjectCategories",
        needs=("101_ObjectCategories",),
        split_file="split_zhou_Caltech101.json",
        files=(
            File(
                ("https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip",),
                "caltech-101.zip",
                ("101_ObjectCategories",),
                md5="3138e1922a9193bfa496528edbbc45d0",
                nested="caltech-101/101_ObjectCategories.tar.gz",
            ),
            split("split_zhou_Caltech101.json", "1hyarUivQE36mY6jSomru6Fjd-JzwcCzN"),
        ),
        aliases=("caltech",),
        pack=(1967, 400, 1461),
    ),
    Dataset(
        "oxford_pets",
        "OxfordPets",
        37,
        "pets, fine-grained",
        "CC BY-SA 4.0; the photographs belong to their owners",
        f"{VGG}/pets/",
        (2944, 736, 3669),
        "a photo of a {}, a type of pet.",
        folder="oxford_pets",
        images="images",
        needs=("images",),
        split_file="split_zhou_OxfordPets.json",
        files=(
            published(f"{VGG}/pets/data/images.tar.gz", "images", md5="5c4f3ee8e5d25df40f4fd59a7f44e54c"),
            published(
                f"{VGG}/pets/data/annotations.tar.gz", "annotations", md5="95a8c909bbe2e81eed6a22bccdf3f68f"
            ),
            split("split_zhou_OxfordPets.json", "1501r8Ber4nNKvmlFVQZ8SeUHTcdTTEqs"),
        ),
        aliases=("pets", "oxford_iiit_pet"),
        pack=(888, 148, 1110),
    ),
    Dataset(
        "stanford_cars",
        "StanfordCars",
        196,
        "cars, fine-grained",
        "non-commercial research",
        "https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        (6509, 1635, 8041),
        "a photo of a {}.",
        folder="stanford_cars",
        images="",
        needs=("cars_train", "cars_test"),
        split_file="split_zhou_StanfordCars.json",
        files=(split("split_zhou_StanfordCars.json", "1ObCFbaAgVu0I-k_Au-gIUcefirdAuizT"),),
        fetchable=False,
        manual="The publisher's files have been reported gone since 2023. From a copy, take cars_train/ and "
        "cars_test/ with the original file names (some copies rename the images), and either "
        "split_zhou_StanfordCars.json or devkit/ with cars_test_annos_withlabels.mat beside it.",
        aliases=("cars", "cars196"),
    ),
    Dataset(
        "oxford_flowers",
        "Flowers102",
        102,
        "flowers, fine-grained",
        "none stated by the publisher; offered for research",
        f"{VGG}/flowers/102/",
        (4093, 1633, 2463),
        "a photo of a {}, a type of flower.",
        folder="oxford_flowers",
        images="jpg",
        needs=("jpg",),
        split_file="split_zhou_OxfordFlowers.json",
        files=(
            published(f"{VGG}/flowers/102/102flowers.tgz", "jpg", md5="52808999861908f626f3c1f4e79d11fa"),
            published(
                f"{VGG}/flowers/102/imagelabels.mat",
                "imagelabels.mat",
                md5="e0620be6f572b9609742df49c70aed4d",
            ),
            split("cat_to_name.json", "1AkcxCXeK_RCGCEC_GvmWxjcjaNhu-at0"),
            split("split_zhou_OxfordFlowers.json", "1Pp0sRXzZFZq15zVOzKjKBu4A9i01nozT"),
        ),
        aliases=("flowers102", "flowers", "oxford_flowers102"),
    ),
    Dataset(
        "food101",
        "Food101",
        101,
        "food, fine-grained",
        "photographs of Foodspotting users: scientific fair use",
        "https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        (50_500, 20_200, 30_300),
        "a photo of {}, a type of food.",
        folder="food-101",
        images="images",
        needs=("images",),
        split_file="split_zhou_Food101.json",
        files=(
            published(
                "http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
                "images",
                "meta",
                md5="85eeb15f3717b99a5da872d97d918f87",
                inside="food-101",
            ),
            split("split_zhou_Food101.json", "1QK0tGi096I0Ba6kggatX1ee6dJFIcEJl"),
        ),
        aliases=("food",),
    ),
    Dataset(
        "fgvc_aircraft",
        "FGVCAircraft",
        100,
        "aircraft, fine-grained",
        "non-commercial research",
        f"{VGG}/fgvc-aircraft/",
        (3334, 3333, 3333),
        "a photo of a {}, a type of aircraft.",
        folder="fgvc_aircraft",
        images="images",
        needs=(
            "images",
            "variants.txt",
            "images_variant_train.txt",
            "images_variant_val.txt",
            "images_variant_test.txt",
        ),
        files=(
            published(
                f"{VGG}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
                "images",
                "variants.txt",
                "images_variant_test.txt",
                md5="d4acdd33327262359767eeaa97a4f732",
                inside="fgvc-aircraft-2013b/data",
            ),
        ),
        aliases=("aircraft", "fgvc"),
    ),
    Dataset(
        "sun397",
        "SUN397",
        397,
        "scenes",
        "research; the photographs belong to their owners",
        "https://vision.princeton.edu/projects/2010/SUN/",
        (15_880, 3970, 19_850),
        "a photo of a {}.",
        folder="sun397",
        images="SUN397",
        needs=("SUN397",),
        split_file="split_zhou_SUN397.json",
        files=(
            published(
                "http://vision.princeton.edu/projects/2010/SUN/SUN397.tar.gz",
                "SUN397",
                md5="8ca2778205c41d23104230ba66911c7a",
            ),
            published(
                "https://vision.princeton.edu/projects/2010/SUN/download/Partitions.zip",
                "ClassName.txt",
                "Training_01.txt",
                "Testing_01.txt",
            ),
            split("split_zhou_SUN397.json", "1y2RD81BYuiyvebdN-JymPfyWYcd8_MUq"),
        ),
        manual="The publisher's addresses were reported dead in 2025; a copy from elsewhere needs "
        "SUN397/a/abbey/... with the original file names, and the split file or Partitions.zip.",
        aliases=("sun",),
    ),
    Dataset(
        "dtd",
        "DTD",
        47,
        "textures",
        "research",
        f"{VGG}/dtd/",
        (2820, 1128, 1692),
        "{} texture.",
        folder="dtd",
        images="images",
        needs=("images",),
        split_file="split_zhou_DescribableTextures.json",
        files=(
            published(
                f"{VGG}/dtd/download/dtd-r1.0.1.tar.gz",
                "images",
                "labels",
                md5="fff73e5086ae6bdbea199a49dfb8a4c1",
                inside="dtd",
            ),
            split("split_zhou_DescribableTextures.json", "1u3_QfB467jqHgNXC00UIzbLZRQCg2S7x"),
        ),
        aliases=("describable_textures", "textures"),
    ),
    Dataset(
        "eurosat",
        "EuroSAT",
        10,
        "satellite images",
        "MIT; Copernicus Sentinel data",
        "https://github.com/phelber/EuroSAT",
        (13_500, 5400, 8100),
        "a centered satellite photo of {}.",
        folder="eurosat",
        images="2750",
        needs=("2750",),
        split_file="split_zhou_EuroSAT.json",
        files=(
            File(
                (
                    "https://madm.dfki.de/files/sentinel/EuroSAT.zip",
                    # The same file, by its MD5, where torchvision takes it from.
                    f"{HUB}/torchgeo/eurosat/resolve/c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip",
                ),
                "EuroSAT.zip",
                ("2750",),
                md5="c8fa014336c82ac7804f0398fcb19387",
            ),
            split("split_zhou_EuroSAT.json", "1Ip7yaCWFi0eaOFUGga0lUdVi_DDQth1o"),
        ),
        pack=(640, 160, 2000),
    ),
    Dataset(
        "ucf101",
        "UCF101",
        101,
        "actions, middle frames of videos",
        "none stated by the publisher; videos from YouTube",
        "https://www.crcv.ucf.edu/data/UCF101.php",
        (7639, 1898, 3783),
        "a photo of a person doing {}.",
        folder="ucf101",
        images="UCF-101-midframes",
        needs=("UCF-101-midframes",),
        split_file="split_zhou_UCF101.json",
        files=(split("split_zhou_UCF101.json", "1I0S0q91hJfsV9Gf4xDIjgDq4AqBNJb1y"),),
        fetchable=False,
        manual="The publisher offers videos in a RAR archive. The field uses the middle frame of each, which "
        "CoOp's authors share as UCF-101-midframes.zip: "
        "https://drive.google.com/file/d/10Jqome3vtUA2keJkNanAiFpgbyC9Hc2O/view (too large to fetch without "
        "a browser). Unpack it, with split_zhou_UCF101.json or the publisher's ucfTrainTestlist/ beside it.",
        aliases=("ucf",),
    ),
    Dataset(
        "imagenetv2",
        "ImageNet-V2",
        1000,
        "objects, a new test set",
        IMAGENET_TERMS + "the collection is MIT",
        "https://github.com/modestyachts/ImageNetV2",
        (0, 0, 10_000),
        "a photo of a {}.",
        folder="imagenetv2",
        images="imagenetv2-matched-frequency-format-val",
        needs=("imagenetv2-matched-frequency-format-val",),
        files=(
            published(
                f"{HUB}/vaishaal/ImageNetV2/resolve/main/imagenetv2-matched-frequency.tar.gz",
                "imagenetv2-matched-frequency-format-val",
            ),
        ),
        aliases=("imagenet-v2", "imagenet_v2"),
    ),
    Dataset(
        "imagenet_sketch",
        "ImageNet-Sketch",
        1000,
        "objects, drawn",
        IMAGENET_TERMS + "none stated for the collection",
        "https://github.com/HaohanWang/ImageNet-Sketch",
        (0, 0, 50_889),
        "a photo of a {}.",
        folder="imagenet-sketch",
        images="images",
        needs=("images",),
        files=(
            published(
                f"{HUB}/songweig/imagenet_sketch/resolve/main/data/ImageNet-Sketch.zip",
                "images",
                inside="sketch",
                place="images",
            ),
        ),
        aliases=("imagenet-s",),
    ),
    Dataset(
        "imagenet_a",
        "ImageNet-A",
        200,
        "objects, natural adversarial examples",
        IMAGENET_TERMS + "the collection is MIT",
        "https://github.com/hendrycks/natural-adv-examples",
        (0, 0, 7500),
        "a photo of a {}.",
        folder="imagenet-adversarial",
        images="imagenet-a",
        needs=("imagenet-a",),
        files=(
            published(f"{BERKELEY}/imagenet-a.tar", "imagenet-a", md5="c3e55429088dc681f30d81f4726b6595"),
        ),
        aliases=("imagenet_adversarial",),
    ),
    Dataset(
        "imagenet_r",
        "ImageNet-R",
        200,
        "objects, in art and other renditions",
        IMAGENET_TERMS + "the collection is MIT",
        "https://github.com/hendrycks/imagenet-r",
        (0, 0, 30_000),
        "a photo of a {}.",
        folder="imagenet-rendition",
        images="imagenet-r",
        needs=("imagenet-r",),
        files=(
            published(f"{BERKELEY}/imagenet-r.tar", "imagenet-r", md5="a61312130a589d0ca1a8fca1f2bd3337"),
        ),
        aliases=("imagenet_rendition",),
    ),
)

PACKS = (
    Dataset(
        "dtd10",
        "DTD, 10 classes",
        10,
        "textures",
        "research; for local testing",
        f"{VGG}/dtd/",
        (240, 40, 360),
        "{} texture.",
        folder="dtd10",
        fetchable=False,
        manual="Unpack dtd10.tar of this project's shared data under the data root.",
        pack=(240, 40, 360),
        kind="pack",
    ),
    Dataset(
        "pacs",
        "PACS",
        7,
        "objects in photos, art, cartoons and sketches",
        "none stated by the publisher; for local testing",
        "https://dali-dl.github.io/project_iccv2017.html",
        (168, 28, 0),
        "a photo of a {}.",
        folder="pacs",
        fetchable=False,
        manual="Unpack pacs.tar of this project's shared data under the data root.",
        pack=(168, 28, 0),
        extra=(
            ("test_art_painting", 280),
            ("test_cartoon", 280),
            ("test_photo", 280),
            ("test_sketch", 280),
        ),
        kind="pack",
    ),
)

DATASETS = BENCHMARK + PACKS


def find(name: str | Dataset) -> Dataset:
    """The dataset of this name, however people write it: Flowers102, flowers-102, oxford_flowers."""
    if isinstance(name, Dataset):
        return name
    spellings = _spellings()
    if plain(name) not in spellings:
        raise unknown("dataset", name, [each.name for each in DATASETS])
    return spellings[plain(name)]


def is_known(name: str) -> bool:
    """Whether a dataset of the catalog is meant."""
    return plain(name) in _spellings()


def plain(name: str) -> str:
    """A name without the capitals, hyphens and underscores that people write differently."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


@cache
def _spellings() -> dict[str, Dataset]:
    return {
        plain(spelling): each
        for each in DATASETS
        for spelling in (each.name, each.title, each.folder, *each.aliases)
    }


@cache
def imagenet_names() -> dict[str, str]:
    """ImageNet's 1,000 WordNet ids, in order, with OpenAI's names for them; the file names its source."""
    return read_names(resources("drople.data").joinpath("imagenet_classes.txt").read_text("utf-8"))


@cache
def flower_names() -> dict[str, str]:
    """Flowers102's labels from 1 to 102 with the names of the flowers; the file names its source."""
    return read_names(resources("drople.data").joinpath("flowers102_classes.txt").read_text("utf-8"))


def read_names(text: str) -> dict[str, str]:
    """Lines of an id, a space and a name, as in CoOp's classnames.txt; those after # are comments."""
    lines = [line.strip() for line in text.splitlines()]
    pairs = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return {key: name.strip() for key, _, name in pairs}


def steps(name: str | Dataset, root: Path) -> list[str]:
    """How to get a dataset by hand, a line a step."""
    entry = find(name)
    folder = root / entry.folder
    lines = [f"{entry.title}: {entry.page} (licence: {entry.licence})"]
    if entry.manual:
        lines.append(entry.manual)
    for file in entry.files:
        if not file.optional:
            inside = f" (the contents of {file.inside}/)" if file.inside else ""
            where = folder / file.place if file.place else folder
            lines.append(f"Download {file.urls[0]} and unpack it{inside} into {where}.")
    if entry.needs:
        lines.append(f"{folder} then holds {', '.join(entry.needs)}.")
    for file in entry.files:
        if file.optional:
            lines.append(f"If it can be had, put {file.filename} beside them: {file.urls[0]}")
    lines.append(f"drople data check {entry.name}")
    return lines
