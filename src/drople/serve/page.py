"""How the page looks, and which part of the workbench each of its controls works."""

from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from drople.answers import percent
from drople.errors import DropleError
from drople.progress import Update
from drople.safe_image import EXTENSIONS
from drople.serve.workbench import THUMB, Neighbour, Retrained, Verdict, Workbench, read_classes, shown

# More pictures than this at once are a job for `drople predict`.
MOST = 64
BARS = 6
STYLE = """
.gradio-container {max-width: 1180px !important; margin: 0 auto !important}
.head h1 {font-size: 1.6rem; font-weight: 700; margin: 0; letter-spacing: -.01em}
.head p {margin: .15rem 0 0; color: var(--body-text-color-subdued)}
.section {font-size: 1.05rem; font-weight: 650; margin: .4rem 0 0}
.notes, .good {padding: .5rem .8rem; border-radius: 4px}
.notes {border-left: 4px solid #b45309; background: color-mix(in srgb, #f59e0b 14%, transparent)}
.good {border-left: 4px solid #047857; background: color-mix(in srgb, #10b981 14%, transparent)}
.notes p, .good p {margin: .1rem 0; overflow-wrap: anywhere}
.verdict {font-size: 1.35rem; font-weight: 650; overflow-wrap: anywhere}
.verdict small {font-weight: 400; font-size: .95rem; color: var(--body-text-color-subdued)}
.shares {--bar: #0f766e; --plain: #94a3b8}
.dark .shares {--bar: #2dd4bf; --plain: #64748b}
.bars {display: grid; grid-template-columns: minmax(5rem, 26%) 1fr 3.6rem; gap: .45rem .8rem; margin: .6rem 0;
  align-items: center; line-height: 1.15}
.bars > * {overflow-wrap: anywhere}
.bars i {display: block; height: 9px; border-radius: 2px; min-width: 2px; background: var(--bar)}
.bars i + i {height: 5px; margin-top: 2px; background: var(--plain)}
.bars .share {text-align: right; font-variant-numeric: tabular-nums}
.bars small, .key {color: var(--body-text-color-subdued)}
.key {font-size: .85rem}
.key span {display: inline-block; margin-right: .9rem}
.key b {display: inline-block; width: .8rem; height: .6rem; border-radius: 2px; margin-right: .3rem}
.alike {display: grid; grid-template-columns: repeat(auto-fill, minmax(86px, 1fr)); gap: .6rem; margin-top: .3rem}
.alike figure {margin: 0}
.alike img {width: 100%; border-radius: 4px; display: block}
.alike figcaption {font-size: .82rem; line-height: 1.25; margin-top: .2rem; overflow-wrap: anywhere}
#outcome {min-height: 84px}
#answers, #answers .grid-wrap {height: auto !important; max-height: none !important; min-height: 0 !important}
@media (max-width: 760px) {
  .sides {flex-direction: column; flex-wrap: nowrap}
  /* Answers first: the classes go below what is said of a picture. */
  .sides > .column {display: contents}
  .sides .later {order: 1}
  #answers .grid-container {grid-template-columns: repeat(2, 1fr) !important}
}
"""
EMPTY = "<p class='key'>Drop some pictures in: what the run makes of them appears here.</p>"


def theme() -> Any:
    """Fonts of the reader's own system: the theme's usual ones are fetched from another site."""
    look = gr.themes.Default(
        primary_hue="teal",
        secondary_hue="teal",
        neutral_hue="slate",
        font=["system-ui", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )
    # The theme's own greys and its white on teal are too pale to read.
    return look.set(
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_hover_dark="*primary_800",
        button_primary_text_color="white",
        button_primary_text_color_dark="white",
    )


class Bar:
    """drople's progress on the bar of the page."""

    def __init__(self, show: Callable[..., Any]) -> None:
        self.show = show
        self.said: list[str] = []

    @contextmanager
    def task(self, what: str, total: int) -> Iterator[Update]:
        def update(done: int, values: Any = None, **more: Any) -> None:
            # gradio reads a pair as steps of steps, and divides by the second.
            self.show((done, max(1, total)), desc=what, unit="")

        update(0)
        yield update

    def say(self, line: str) -> None:
        self.said.append(line)


def lay_out(bench: Workbench) -> gr.Blocks:
    """The page of a workbench."""
    names = list(bench.original.classes_)
    passes = int(bench.original.config_["training"]["epochs"])
    with gr.Blocks(title="drople", analytics_enabled=False, delete_cache=(3600, 86400)) as blocks:
        gr.HTML(heading(bench))
        good, chosen, labels = gr.State([]), gr.State(0), gr.State({})
        notes = gr.HTML(visible=False, elem_id="notes")
        with gr.Row(elem_classes="sides"):
            with gr.Column(scale=2, min_width=320):
                files = gr.File(
                    label=f"Pictures (up to {MOST})",
                    file_count="multiple",
                    file_types=sorted(EXTENSIONS),
                    elem_id="pictures",
                    height=170,
                )
                gr.HTML(section("Answers", "Choose one to see why."))
                gallery = gr.Gallery(
                    show_label=False,
                    columns=3,
                    fit_columns=False,
                    height="auto",
                    allow_preview=False,
                    object_fit="cover",
                    format="jpeg",
                    buttons=[],
                    interactive=False,
                    elem_id="answers",
                )
                with gr.Column(elem_classes="later"):
                    gr.HTML(
                        section("Classes", "One a line. New ones need no training: their names are read.")
                    )
                    classes = gr.Textbox(
                        "\n".join(names),
                        label="Classes to choose from",
                        lines=min(8, len(names) + 1),
                        max_lines=12,
                        elem_id="classes",
                    )
                    with gr.Row():
                        new = gr.Textbox(
                            label="New class",
                            show_label=False,
                            placeholder="new class",
                            container=False,
                            scale=3,
                            min_width=120,
                            elem_id="new-class",
                        )
                        add = gr.Button("Add", scale=1, min_width=60, elem_id="add-class")
                    template = gr.Textbox(
                        bench.template,
                        label="Sentence around a class name",
                        info="With {}, or the word eleven. For the untrained model and for retraining: this run's "
                        "learned prompts stand in its place.",
                        elem_id="template",
                    )
                    with gr.Row():
                        apply = gr.Button("Apply", variant="primary", min_width=60, elem_id="apply")
                        restore = gr.Button("Restore", min_width=60, elem_id="restore")
            with gr.Column(scale=3, min_width=320):
                verdict = gr.HTML(EMPTY, elem_id="verdict", padding=False)
                with gr.Row():
                    photo = picture("What the model sees", "photo")
                    heat = picture("What speaks for the class", "heat")
                explained = gr.Dropdown(
                    names, value=None, label="Explain the class", interactive=True, elem_id="explained"
                )
                nearest = gr.HTML(elem_id="nearest", padding=False)
                gr.HTML(section("Teach it", "Label a few pictures, then retrain: seconds to minutes."))
                with gr.Row(equal_height=True):
                    label = gr.Dropdown(
                        names,
                        value=None,
                        label="This picture shows",
                        interactive=True,
                        scale=3,
                        min_width=200,
                        elem_id="label",
                    )
                    tell = gr.Button("Keep as a training image", scale=2, min_width=200, elem_id="tell")
                labelled = gr.HTML(elem_id="labelled", padding=False)
                with gr.Row(equal_height=True):
                    epochs = gr.Slider(
                        1,
                        max(100, passes),
                        value=passes,
                        step=1,
                        label="Passes over the images",
                        min_width=200,
                        elem_id="epochs",
                    )
                    save_as = gr.Textbox(
                        label="Save as (optional)",
                        placeholder="a new folder beside the run",
                        visible=bench.runs is not None,
                        min_width=200,
                        elem_id="save-as",
                    )
                with gr.Row():
                    retrain = gr.Button("Retrain", variant="primary", min_width=90, elem_id="retrain")
                    forget = gr.Button("Forget labels", min_width=90, elem_id="forget")
                    reset = gr.Button("Undo training", min_width=90, elem_id="reset")
                outcome = gr.HTML(elem_id="outcome", padding=False)

        def detail(paths: list[str], which: int, text: str, sentence: str) -> list[Any]:
            """Verdict, photo, overlay, explained class, neighbours, label: of one picture."""
            listed = read_classes(text)
            options = gr.update(choices=listed)
            if not paths:
                return [EMPTY, None, None, gr.update(choices=listed, value=None), "", options]
            file = paths[min(which, len(paths) - 1)]
            [found], _ = bench.verdicts([file], listed, sentence, strict=True)
            return [
                verdict_html(found, bench.calibrated),
                shown(file, 384),
                bench.explain(file, found.best, listed),
                gr.update(choices=listed, value=found.best),
                alike_html(bench.neighbours(file)),
                gr.update(choices=listed, value=found.best),
            ]

        def look(given: list[str] | None, which: int, text: str, sentence: str) -> list[Any]:
            """Everything that hangs on the pictures, the classes, the sentence or the model."""
            paths = [str(path) for path in given or []]
            found, said = bench.verdicts(paths[:MOST], read_classes(text), sentence)
            if len(paths) > MOST:
                said.append(f"only the first {MOST} of {len(paths)} pictures are shown")
            readable = [v.file for v in found]
            which = min(which, max(0, len(readable) - 1))
            answers = [(shown(v.file, THUMB), f"{v.best} {v.run.max():.0%}") for v in found]
            gallery_now = gr.update(value=answers, selected_index=which if answers else None)
            return [
                tell_user(said),
                readable,
                which,
                gallery_now,
                *detail(readable, which, text, sentence),
            ]

        details = [verdict, photo, heat, explained, nearest, label]
        everything = [notes, good, chosen, gallery, *details]
        view = (careful(look, len(everything)), [files, chosen, classes, template], everything)
        quiet: dict[str, Any] = {"api_visibility": "private"}

        files.change(*view, **quiet, show_progress_on=[verdict])
        for event in (apply.click, classes.blur, template.submit, template.blur):
            event(*view, **quiet, show_progress="hidden")
        adding = (append_class, [classes, new], [classes, new])
        add.click(*adding, **quiet).then(*view, **quiet, show_progress="hidden")
        new.submit(*adding, **quiet).then(*view, **quiet, show_progress="hidden")
        restore.click(lambda: ["\n".join(names), bench.template], None, [classes, template], **quiet).then(
            *view, **quiet, show_progress="hidden"
        )

        def show(paths: list[str], which: int, text: str, sentence: str) -> list[Any]:
            return [tell_user([]), *detail(paths, which, text, sentence)]

        gallery.select(picked, None, chosen, **quiet).then(
            careful(show, 1 + len(details)), [good, chosen, classes, template], [notes, *details], **quiet
        )

        def explain(paths: list[str], which: int, text: str, wanted: str | None) -> list[Any]:
            if not paths or not wanted:
                return [tell_user([]), None]
            file = paths[min(which, len(paths) - 1)]
            return [tell_user([]), bench.explain(file, wanted, read_classes(text))]

        explained.input(careful(explain, 2), [good, chosen, classes, explained], [notes, heat], **quiet)

        def keep(told: dict[str, str], paths: list[str], which: int, name: str | None) -> list[Any]:
            if paths and name:
                told = {**told, paths[min(which, len(paths) - 1)]: name}
            return [told, label_list(told)]

        tell.click(keep, [labels, good, chosen, label], [labels, labelled], **quiet)
        forget.click(lambda: [{}, label_list({})], None, [labels, labelled], **quiet)

        def learn(
            told: dict[str, str],
            text: str,
            sentence: str,
            count: int,
            name: str,
            bar: gr.Progress = gr.Progress(),  # noqa: B008 (how gradio finds it)
        ) -> str:
            shown_on = Bar(bar)
            try:
                done = bench.retrain(
                    told,
                    read_classes(text),
                    template=sentence.strip(),
                    epochs=int(count),
                    save_as=name or "",
                    progress=shown_on,
                )
            except (DropleError, OSError) as error:
                return box([str(error)], "notes")
            return box([outcome_line(done), *told_lines(bench), *shown_on.said], "good")

        retrain.click(learn, [labels, classes, template, epochs, save_as], outcome, **quiet).then(
            *view, **quiet, show_progress="hidden"
        )

        def back() -> str:
            bench.reset()
            return box(["The run answers as it was saved."], "good")

        reset.click(back, None, outcome, **quiet).then(*view, **quiet, show_progress="hidden")
    return blocks


# Parts of the page -----------------------------------------------------------------------------------


def picture(label: str, name: str) -> gr.Image:
    return gr.Image(
        label=label,
        interactive=False,
        format="jpeg",
        height=300,
        min_width=160,
        buttons=["fullscreen"],
        elem_id=name,
        alt_text=label,
    )


def careful(look: Callable[..., list[Any]], count: int) -> Callable[..., list[Any]]:
    """What the user can mend is said on the page, and leaves the rest of it as it is."""

    def safe(*given: Any) -> list[Any]:
        try:
            return look(*given)
        except (DropleError, OSError) as error:
            return [tell_user([str(error)]), *(gr.skip() for _ in range(count - 1))]

    return safe


def append_class(text: str, new: str) -> tuple[str, str]:
    """The list with the new one, and an emptied field."""
    return "\n".join(read_classes(f"{text}\n{new}")), ""


def picked(event: gr.SelectData) -> int:
    return int(event.index)


def tell_user(lines: Sequence[str]) -> Any:
    return gr.update(value=box(lines, "notes"), visible=bool(lines))


def box(lines: Sequence[str], kind: str) -> str:
    return f"<div class='{kind}' role='status'>{''.join(f'<p>{escape(line)}</p>' for line in lines)}</div>"


def heading(bench: Workbench) -> str:
    learner = bench.original
    accuracy = learner.metrics_.get("validation", {}).get("accuracy")
    facts = [
        f"{learner.method} on {Path(learner.backbone_.name).name}",
        f"{len(learner.classes_)} classes from {len(learner.config_['samples'])} images",
    ]
    facts += [] if accuracy is None else [f"{percent(accuracy)} right on validation images"]
    return f"<div class='head'><h1>drople</h1><p>{escape(' · '.join(facts))}</p></div>"


def verdict_html(found: Verdict, calibrated: bool) -> str:
    """The answer, and bars of the likeliest classes: the run's above, the untrained model's below."""
    best = found.run.argsort()[::-1][:BARS]
    rows = "".join(
        f"<span>{escape(found.classes[k])}</span>"
        f"<span><i style='width:{100 * found.run[k]:.1f}%'></i>"
        f"<i style='width:{100 * found.untrained[k]:.1f}%'></i></span>"
        f"<span class='share'>{percent(float(found.run[k]))}<br>"
        f"<small>{percent(float(found.untrained[k]))}</small></span>"
        for k in best
    )
    name, sure = escape(found.best), percent(float(found.run.max()))
    key = (
        f"<p class='key'><span><b style='background:var(--bar)'></b>this run, "
        f"{'calibrated' if calibrated else 'not calibrated: it had no validation images'}</span> "
        "<span><b style='background:var(--plain)'></b>the untrained model</span></p>"
    )
    return (
        f"<div class='verdict'>{name} <small>{sure} sure, {escape(Path(found.file).name)}</small></div>"
        f"<div class='shares'><div class='bars'>{rows}</div>{key}</div>"
    )


def section(title: str, about: str) -> str:
    return f"<div><h2 class='section'>{escape(title)}</h2><span class='key'>{escape(about)}</span></div>"


def alike_html(found: Sequence[Neighbour]) -> str:
    """The pictures themselves are in the page, so that no file of the data needs to be opened to it."""
    if not found:
        return ""
    figures = "".join(
        f"<figure><img src='{inline(n.image)}' alt='a training image of {escape(n.class_name)}'>"
        f"<figcaption>{escape(n.class_name)}{' (yours)' if n.uploaded else ''}<br>"
        f"<span class='key'>{n.similarity:.3f}</span></figcaption></figure>"
        for n in found
    )
    about = section("Nearest training images", "By the cosine of the learned features.")
    return f"{about}<div class='alike'>{figures}</div>"


def inline(image: Image.Image) -> str:
    written = BytesIO()
    image.save(written, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{b64encode(written.getvalue()).decode()}"


def label_list(told: dict[str, str]) -> str:
    if not told:
        return ""
    counts = ", ".join(f"{count} × {escape(name)}" for name, count in Counter(told.values()).items())
    files = ", ".join(f"{escape(Path(file).name)} → {escape(name)}" for file, name in told.items())
    return f"<p><strong>{len(told)} labelled</strong>: {counts}</p><p class='key'>{files}</p>"


def outcome_line(done: Retrained) -> str:
    line = (
        f"Retrained on {done.samples} training images and {done.uploads} of yours, {len(done.classes)} classes, "
        f"in {done.seconds:.0f} s; it answers now."
    )
    if done.after is not None:
        line += f" Validation accuracy: {percent(done.after)}"
        line += "." if done.before is None else f" ({percent(done.before)} before)."
    return line + (f" Saved as {done.saved.name}." if done.saved else " Kept in memory only.")


def told_lines(bench: Workbench) -> list[str]:
    """What a retraining without the run's own images leaves out."""
    if bench.samples:
        return []
    return [
        "Without --data the run's own training images were not there: it learned from yours alone, and is not "
        "calibrated."
    ]
