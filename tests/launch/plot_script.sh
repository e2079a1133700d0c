#!/usr/bin/env bash
# launch/plot draws what reports say, the same picture of the same report, and refuses others.
set -euo pipefail
# shellcheck source=tests/launch/script_driver.sh
source "$(dirname "${BASH_SOURCE[0]}")/script_driver.sh"

python=
for name in python3 /usr/bin/python3; do
  if "$name" -c 'import matplotlib' 2>/dev/null; then python=$name && break; fi
done
if [[ -z $python ]]; then
  echo "skipped: launch.plot (python3-matplotlib is not installed)"
  exit 77
fi
export MPLCONFIGDIR=$scratch/matplotlib

# Numbers that no machine has measured: reports as bench writes them, and what is none.
"$python" - "$scratch" <<'PYTHON'
import json, sys
folder = sys.argv[1]

def write(name, root):
    with open(f"{folder}/{name}.json", "w") as file:
        json.dump(root, file)

def report(rows, **options):
    return {"options": {"command": "bench", "iterations": 7, **options},
            "environment": {"gatefold": "0.1.0", "ranks": "8", "processor": "A made-up processor",
                            "device": "cpu, 1 thread", "comm": "MPI", "revision": "0123abcd"},
            "rows": rows, "notes": []}

def layer(ranks, tokens, speed, **more):
    time = 1000.0 * tokens / speed
    row = {"config": "made-up", "layer": 3, "tokens": tokens, "one_rank_tokens": tokens,
           "scaling": "strong", "ranks": ranks, "tp": ranks, "dp": 1, "ep": "-", "dtype": "bf16",
           "reduce": "exact", "dispatcher": "-", "time_us": time, "min_us": 0.9 * time,
           "p90_us": 1.3 * time, "max_us": 2 * time, "speed_up": speed,
           "phase_gate_up_us": 0.6 * time, "phase_down_us": 0.3 * time,
           "phase_sum_us": 0.05 * time, "phase_other_us": 0.05 * time}
    return {**row, **more}

def sent(what, how, size, rate):
    time = size / rate * 1e-3
    return {"what": what, "how": how, "ranks": 2 if what == "message" else 8, "bytes": size,
            "time_us": time, "min_us": 0.8 * time, "p90_us": 1.2 * time, "max_us": 3 * time,
            "tflops": "-", "algbw_gb_per_s": rate, "busbw_gb_per_s": rate}

strong = [layer(n, tokens, n ** power) for tokens, power in ((1, 0.5), (64, 0.9), (512, 0.97))
          for n in (1, 2, 4, 8)]
sizes = [8, 4096, 1 << 20, 64 << 20]
machine = [{"what": "gemm", "how": "bf16, 256 cubed", "ranks": 1, "bytes": "-", "tflops": 1.5}]
machine += [sent(what, how, size, size ** 0.4) for size in sizes
            for what, how in (("message", "same node"), ("message", "other node"),
                              ("all-reduce", "library's, f32"), ("all-to-all", "equal parts"),
                              ("canonical sum", "f32"), ("canonical sum", "bf16"))]
machine += [{**sent("dispatch + combine", "some tokens", 1 << 20, 1), "busbw_gb_per_s": "-"}]
write("strong", report(strong))
write("slower", report([layer(n, 64, n ** 0.6) for n in (1, 2, 4, 8)]))
write("weak", report([layer(n, 64 * n, n ** 0.8, one_rank_tokens=64, scaling="weak")
                      for n in (1, 2, 4, 8)]))
write("machine", report(machine, machine=True))
write("experts", report([layer(n, tokens, n, tp=1, dp=n, ep=n, dispatcher="alltoall")
                         for tokens in range(1, 6) for n in (16, 32)]))
write("crowd", report([layer(n, tokens, n, config="a-long-name-of-a-model-" * 3 * (tokens % 2) + "x")
                       for tokens in range(1, 31) for n in (1, 2, 8)]))
write("gpu", report([layer(n, 64, n, phase_gate_up_us="-", phase_down_us="-", phase_sum_us="-",
                           phase_other_us="-") for n in (1, 2)]))
write("one-rank", report([layer(1, 64, 1, phase_gate_up_us=None, phase_down_us=None,
                                phase_sum_us=None, phase_other_us=None)]))
write("no-rows", report([]))
write("verify", {**report([]), "options": {"command": "verify"}})
write("list", [1, 2])
write("rows", report(["a row"]))
write("machine-of-one", report(machine[:1], machine=True))
PYTHON
echo '{"options": {' >"$scratch/cut.json"
printf '\xff\xfe' >"$scratch/bytes.json"
mkdir "$scratch/without" "$scratch/closed"
echo 'raise ImportError("none")' >"$scratch/without/matplotlib.py"

plot() { "$here/launch/plot" "$@"; }
reads() { plot -o "$scratch/picture" "$@"; }
in_folder() { (cd "$scratch" && "$here/launch/plot" "$@"); }


# What is drawn, by the script's own functions: numbers worked out by hand.
cat >"$scratch/drawn.py" <<'PYTHON'
import importlib.machinery, importlib.util, sys
loader = importlib.machinery.SourceFileLoader("plot", sys.argv[1])
plot = importlib.util.module_from_spec(importlib.util.spec_from_loader("plot", loader))
loader.exec_module(plot)
read = lambda name: plot.Results(f"{sys.argv[2]}/{name}.json", name)
near = lambda a, b: abs(a - b) < 1e-9

shared, series, scalings = plot.scaling_series([read("strong")])
assert list(series) == ["1 token", "64 tokens", "512 tokens"], series
assert scalings == {"strong scaling"} and shared == "made-up, layer 3, bf16, exact", shared
ranks, speed, below, above = series["1 token"][2]
assert ranks == 4 and near(speed, 2) and near(below, 2 - 2 / 1.3) and near(above, 2 / 0.9 - 2)
shared, series, scalings = plot.scaling_series([read("strong"), read("slower"), read("weak")])
assert "strong, strong scaling, 64 tokens" in series and "slower, strong scaling, 64 tokens" in series
assert "weak, weak scaling, 64 tokens a rank" in series, list(series)

bars = plot.phase_bars([read("strong")])
assert [bar[1] for bar in bars] == ["tp 1", "tp 2", "tp 4", "tp 8"] * 3, "side by side"
sent = plot.bandwidth_series([read("machine")])
size, rate, _, _ = sent["message, other node"][1]
assert size == 4096 and near(rate, 4096 ** 0.4)
assert list(sent)[2:] == ["all-reduce, 8 ranks", "all-to-all, 8 ranks",
                          "canonical sum, f32, 8 ranks", "canonical sum, bf16, 8 ranks"], list(sent)

figure = plot.draw(plot.use_matplotlib(), [read("strong"), read("machine")], plot.PANELS)
speed, efficiency, phases, bandwidth = [axes for axes in figure.axes if axes.get_title()]
assert all(axes.get_ylim()[0] == 0 for axes in (speed, efficiency, phases)), "axes from zero"
ideal = [line for line in speed.lines if line.get_label() == "ideal"][0]
assert list(ideal.get_xdata()) == list(ideal.get_ydata()) == [1, 8]
tops = {}
for bar in phases.patches:
    tops[bar.get_x()] = max(tops.get(bar.get_x(), 0), bar.get_y() + bar.get_height())
assert len(tops) == 12 and all(near(top, 100) for top in tops.values()), tops
caption = figure._supxlabel.get_text()
for word in ("A made-up processor", "7 repeats", "revision 0123abcd", "8 ranks", "medians"):
    assert word in caption, caption

# Of a mixture ep, and dp with it, grow along a line; what stands under its bars has the room.
_, series, _ = plot.scaling_series([read("experts")])
assert [[point[0] for point in points] for points in series.values()] == [[16, 32]] * 5, series
figure = plot.draw(plot.use_matplotlib(), [read("experts")], ("phases",))
figure.canvas.draw()
under = [text.get_window_extent() for text in figure.axes[0].get_xticklabels() +
         figure.axes[1].get_xticklabels() if text.get_text().startswith("tp")]
assert len(under) == 10 and all(a.x1 < b.x0 for a, b in zip(under, under[1:])), under

# More lines than there is room for: said, each near its rank, and no name out of the picture.
figure = plot.draw(plot.use_matplotlib(), [read("crowd")], ("scaling",))
legend, speed, efficiency = figure.axes
assert "the first 24 of 30 lines" in efficiency.get_title(), efficiency.get_title()
lines = [line for line in speed.lines if line.get_label() != "ideal" and len(line.get_xdata()) == 3]
assert len(lines) >= 24 and all(abs(x - rank) < 0.3 for line in lines
                                for x, rank in zip(line.get_xdata(), (1, 2, 8))), "near their ranks"
left, right = speed.get_xlim()
assert all(left < x < right for line in lines for x in line.get_xdata()), "within the axes"
figure.canvas.draw()
box, page = legend.get_legend().get_window_extent(), figure.bbox
assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, (box, page)
print("drawn as worked out")
PYTHON
cat >"$scratch/files.py" <<'PYTHON'
import struct, sys, xml.etree.ElementTree
with open(sys.argv[1] + ".png", "rb") as file:
    head = file.read(24)
assert head[:8] == b"\x89PNG\r\n\x1a\n", head
width, height = struct.unpack(">II", head[16:24])
assert width == 1300 and height > 300, (width, height)
root = xml.etree.ElementTree.parse(sys.argv[1] + ".svg").getroot()
assert root.tag.endswith("svg"), root.tag
print("both are pictures")
PYTHON
differ() { ! cmp -s "$1" "$2"; }

case_of "numbers"             0 "drawn as worked out" "$python" "$scratch/drawn.py" "$here/launch/plot" "$scratch"
case_of "strong scaling"      0 "picture.png|picture.svg" reads "$scratch/strong.json"
case_of "PNG and SVG"         0 "both are pictures" "$python" "$scratch/files.py" "$scratch/picture"
case_of "words"               0 "" grep -q -e '<!-- 512 tokens -->' "$scratch/picture.svg"
for ending in png svg; do cp "$scratch/picture.$ending" "$scratch/first.$ending"; done
case_of "once more"           0 "picture.png" reads "$scratch/strong.json"
case_of "the same PNG"        0 "" cmp "$scratch/picture.png" "$scratch/first.png"
case_of "the same SVG"        0 "" cmp "$scratch/picture.svg" "$scratch/first.svg"
case_of "another report"      0 "picture.png" reads "$scratch/slower.json"
case_of "another PNG"         0 "" differ "$scratch/picture.png" "$scratch/first.png"
case_of "another SVG"         0 "" differ "$scratch/picture.svg" "$scratch/first.svg"
case_of "all over each other" 0 "picture.svg" reads "$scratch"/{strong,slower,weak,machine,gpu}.json
case_of "one panel"           0 "picture.svg" reads --only bandwidth "$scratch/strong.json" "$scratch/machine.json"
case_of "no scaling there"    1 "" grep -q 'Speed-up' "$scratch/picture.svg"
case_of "the file's own name" 0 "weak.png|weak.svg" in_folder weak.json
case_of "a GPU has no phases" 65 "plot: nothing to draw for phases|bench --machine" reads --only phases "$scratch/gpu.json"
case_of "one rank"            65 "plot: nothing to draw" reads "$scratch/one-rank.json"
case_of "no rows"             65 "plot: nothing to draw" reads "$scratch/no-rows.json"
case_of "a machine's GEMMs"   65 "plot: nothing to draw" reads "$scratch/machine-of-one.json"
case_of "no such file"        66 "none.json can't be opened (No such file" reads "$scratch/none.json"
case_of "a folder"            66 "can't be opened (Is a directory" reads "$scratch"
case_of "cut off"             65 "cut.json is not JSON" reads "$scratch/cut.json"
case_of "other bytes"         65 "bytes.json is not JSON" reads "$scratch/bytes.json"
case_of "verify's"            65 "is of gatefold verify" reads "$scratch/verify.json"
case_of "no report"           65 "list.json is no report of gatefold's" reads "$scratch/list.json"
case_of "no rows in it"       65 "rows.json is no report of gatefold's" reads "$scratch/rows.json"
case_of "no file"             64 "plot: |results" plot
case_of "an unknown option"   64 "--colour" reads --colour "$scratch/strong.json"
case_of "an unknown panel"    64 "--only 'speed' is unknown" reads --only speed "$scratch/strong.json"
case_of "no such place"       74 "none/x.png can't be written (No such file" plot -o "$scratch/none/x" "$scratch/strong.json"
case_of "help"                0 "launch/plot results.json|--only" plot --help
case_of "no matplotlib"       69 "install python3-matplotlib" env PYTHONPATH="$scratch/without" "$here/launch/plot" "$scratch/strong.json"
mkdir "$scratch/picture.d.png"
case_of "a folder in its way" 74 "picture.d.png can't be written" plot -o "$scratch/picture.d" "$scratch/strong.json"
case_of "nothing left behind" 1 "" grep -q . <(find "$scratch" -name '.plot-*')
finish
