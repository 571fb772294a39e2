"""The page, in Gradio: what is on it, and what its buttons do. What to say and how to draw is decided elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from demo import words
from demo.asking import MOST_GUIDANCE, MOST_IMAGES, SEEDS, checked, shapes_of
from demo.comparing import Comparison
from demo.errors import sentence
from demo.pictures import Shelf, still
from demo.studio import Studio
from diffgraph.shapes.prompt_arguments import SCALES, per_prompt_argument

CSS = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
#: All that uses the pipeline waits in one queue with one worker.
ONE_AT_A_TIME = {"concurrency_id": "pipeline", "concurrency_limit": 1}
#: As a default of a handler's argument, Gradio replaces it by the bar of the request.
_PROGRESS = gr.Progress()
_FONTS = ["system-ui", "sans-serif"]  # which are on every machine: nothing is fetched
THEME = gr.themes.Soft(primary_hue="indigo", font=_FONTS, font_mono=["ui-monospace", "monospace"])
LAUNCH: dict[str, Any] = {"theme": THEME, "css": CSS, "footer_links": [], "ssr_mode": False}


def build(studio: Studio) -> gr.Blocks:
    """The page of this studio; serve it with `.launch(**LAUNCH)`."""
    return Page(studio).blocks


class Page:
    def __init__(self, studio: Studio) -> None:
        self.studio, self.shelf = studio, Shelf()
        # Pictures that were shown are deleted an hour later
        with gr.Blocks(title=words.TITLE, analytics_enabled=False, delete_cache=(600, 3600)) as self.blocks:
            gr.HTML(words.introduction(studio.model), padding=False)
            with gr.Row():
                with gr.Column(scale=2, min_width=300):
                    self._wish()
                with gr.Column(scale=3, min_width=320):
                    self._result()
            self._recordings()
            with gr.Accordion("What the words mean", open=False):
                gr.Markdown(words.HOW)
            self._connect()
        self.blocks.queue(default_concurrency_limit=1, max_size=64)

    # -- what is on it

    def _wish(self) -> None:
        model = self.studio.model
        guided = next((name for name in SCALES if name in model.accepted), None)
        default = model.defaults.get(guided or "")
        many = per_prompt_argument(model.accepted) is not None and not model.makes_video
        self.prompt = gr.Textbox(model.prompts[0], label="Prompt", info="what the picture should show", lines=2, elem_id="prompt")
        self.negative = gr.Textbox(
            label="Negative prompt",
            info="what it should not show",
            elem_id="negative",
            visible="negative_prompt" in model.accepted,
        )
        self.size = gr.Radio(
            self._sizes(), value=self._sizes()[0][1], label="Size", info="height × width, in pixels", elem_id="size"
        )
        self.own_size = gr.Textbox(
            label="Or a size of your own", placeholder=f"HEIGHTxWIDTH, e.g. {model.stranger}", max_lines=1, elem_id="own-size"
        )
        with gr.Row():
            self.steps = gr.Slider(2, 100, value=model.steps, step=1, label="Steps", min_width=140, elem_id="steps")
            self.guidance = gr.Slider(
                0,
                MOST_GUIDANCE,
                value=float(default) if isinstance(default, (int, float)) else 4.0,
                step=0.5,
                label="Guidance",
                info="1 or less: off",
                visible=guided is not None,
                min_width=140,
                elem_id="guidance",
            )
        with gr.Row():
            self.seed = gr.Number(
                0, label="Seed", info="the same seed, the same picture", precision=None, min_width=140, elem_id="seed"
            )
            self.randomize = gr.Checkbox(
                False, label="Randomize", info="another seed each time", min_width=140, elem_id="randomize"
            )
        self.images = gr.Slider(1, MOST_IMAGES, value=1, step=1, label="Pictures at once", visible=many, elem_id="images")
        self.paused = gr.Checkbox(
            False, label="Pause diffgraph", info="draw your accelerated picture eager, too: nothing is replayed", elem_id="paused"
        )
        self.draw = gr.Button("Draw", variant="primary", size="lg", elem_id="draw")
        sizes = self.studio.sizes()
        examples = [(prompt, sizes[0][0]) for prompt in model.prompts] + [(model.prompts[0], sizes[-1][0])]
        gr.Examples(
            list(map(list, examples)),
            [self.prompt, self.size],
            label="Examples: the last has a size that is not recorded",
            example_labels=[f"{prompt}, {size}" for prompt, size in examples],
            api_visibility="private",
        )

    def _result(self) -> None:
        self.verdict = gr.HTML(words.waiting(), padding=False, elem_id="verdict")
        with gr.Row():
            self.eager = gr.Gallery(
                label="Eager", format="png", height=330, object_fit="contain", columns=1, min_width=120, elem_id="eager"
            )
            self.accelerated = gr.Gallery(
                label="Accelerated",
                format="png",
                height=330,
                object_fit="contain",
                columns=1,
                min_width=120,
                elem_id="accelerated",
            )
        self.slider = gr.ImageSlider(
            label="Drag: eager | accelerated", format="png", max_height=420, interactive=False, elem_id="slider"
        )
        self.pairs = gr.State([])

    def _recordings(self) -> None:
        state, model = self.studio.state(), self.studio.model
        gr.HTML("<h2>What is recorded</h2>", padding=False)
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self.table = gr.HTML(words.table(state, model), padding=False, elem_id="signatures")
            with gr.Column(scale=2, min_width=300):
                self.gauge = gr.HTML(words.gauge(state, model), padding=False, elem_id="gauge")
                self.shapes = gr.Textbox(
                    label="Record more sizes",
                    info="HEIGHTxWIDTH, several with spaces between; @batch=2 behind one: two pictures at once",
                    placeholder=model.stranger,
                    max_lines=1,
                    elem_id="shapes",
                )
                with gr.Row():
                    self.record = gr.Button("Record", variant="primary", min_width=120, elem_id="record")
                    self.reset = gr.Button("Reset", min_width=120, elem_id="reset")
                self.told = gr.HTML(padding=False, elem_id="told")

    def _connect(self) -> None:
        shown = [self.table, self.gauge, self.size]
        drawn = [self.verdict, self.eager, self.accelerated, self.slider, self.pairs, self.seed, self.shapes]
        wish = [self.prompt, self.negative, self.size, self.own_size, self.steps, self.guidance, self.seed, self.randomize]
        wish += [self.images, self.paused]
        act = {"api_visibility": "private", **ONE_AT_A_TIME}
        gr.on(
            [self.draw.click, self.prompt.submit],
            self._draw,
            wish,
            [*drawn, *shown],
            show_progress_on=[self.verdict],
            **act,
        )
        told = {"outputs": [self.told, *shown], "show_progress_on": [self.told], **act}
        gr.on([self.record.click, self.shapes.submit], self._record, [self.shapes, self.size], **told)
        self.reset.click(self._reset, [self.size], **told)
        quick: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
        for gallery in (self.eager, self.accelerated):
            gallery.select(_selected, [self.pairs], [self.slider], **quick)
        self.size.change(lambda: "", None, self.own_size, **quick)  # what was chosen last counts
        self.blocks.load(self._shown, [self.size], shown, show_progress="hidden", **act)  # what others have recorded meanwhile

    # -- what its buttons do

    def _draw(
        self, prompt, negative, size, own_size, steps, guidance, seed, randomize, images, paused, progress=_PROGRESS
    ) -> Iterator[tuple]:
        nothing = [gr.skip()] * 10
        if randomize:
            seed = random.randrange(SEEDS)
        try:
            ask = checked(
                self.studio.model,
                prompt=prompt,
                negative=negative,
                size=str(own_size or "").strip() or size,
                steps=steps,
                guidance=guidance,
                seed=seed,
                images=images,
                paused=paused,
            )
            for found in self.studio.compare(ask, _bar(progress)):
                hint = str(ask.shape) if found.complete and "unseen_signature" in found.route.reasons else gr.skip()
                shown = self._shown(size) if found.complete else [gr.skip()] * 3
                yield words.result(found), *self._pictures(found), ask.seed, hint, *shown
        except Exception as error:
            yield words.problem(sentence(error)), *nothing[1:]

    def _pictures(self, found: Comparison) -> tuple[Any, Any, Any, Any]:
        show: Callable[[Any], Any] = self.shelf.video if self.studio.model.makes_video else still
        eager = [show(picture) for picture in found.eager[0].pictures]
        columns = 1 if len(eager) == 1 else 2
        if not found.accelerated:
            return gr.Gallery(eager, columns=columns), gr.Gallery([], columns=columns), None, []
        ours = [show(picture) for picture in found.accelerated[0].pictures]
        pairs = list(zip(eager, ours, strict=True))
        return gr.Gallery(eager, columns=columns), gr.Gallery(ours, columns=columns), pairs[0], pairs

    def _record(self, text, size, progress=_PROGRESS) -> Iterator[tuple]:
        try:
            shapes = shapes_of(self.studio.model, text)
            missing = self.studio.capture(shapes, _bar(progress))
            names = ", ".join(map(str, shapes))
            if missing:
                reasons = ", ".join(sorted({row.signature.reason or "not tried" for row in missing}))
                yield words.problem(f"Of {names}, {len(missing)} recordings could not be made: {reasons}."), *self._shown(size)
            else:
                yield words.done(f"Recorded: {names}. Draw it now: it replays."), *self._shown(size)
        except Exception as error:
            yield words.problem(sentence(error)), *self._shown(size)

    def _reset(self, size, progress=_PROGRESS) -> Iterator[tuple]:
        try:
            self.studio.reset(_bar(progress))
            yield words.done("Everything was forgotten, and the first sizes were recorded again."), *self._shown(size)
        except Exception as error:
            yield words.problem(sentence(error)), *[gr.skip()] * 3

    def _shown(self, size) -> tuple[str, str, Any]:
        state, sizes = self.studio.state(), self._sizes()
        # The choice itself is left alone where it can be: the visitor may have made another one meanwhile
        gone = {} if size in [value for _, value in sizes] else {"value": sizes[0][1]}
        return words.table(state, self.studio.model), words.gauge(state, self.studio.model), gr.Radio(choices=sizes, **gone)

    def _sizes(self) -> list[tuple[str, str]]:
        return [
            (f"{size.replace('x', ' × ')} · {'recorded' if recorded else 'not recorded'}", size)
            for size, recorded in self.studio.sizes()
        ]


def _bar(progress: gr.Progress) -> Callable[[float, str], None]:
    return lambda share, text: progress(share, desc=text)


def _selected(pairs, event: gr.SelectData) -> Any:
    """The picture that was clicked, under the slider."""
    return pairs[event.index] if pairs and event.index < len(pairs) else gr.skip()
