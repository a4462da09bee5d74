//! Text for the metrics page, beside what the router counts of itself.

use std::fmt::Write as _;

/// A metrics page in OpenMetrics.
#[derive(Debug, Default)]
pub struct Page(String);

impl Page {
    /// A page that begins with what the router says of itself.
    pub fn behind(router: String) -> Self {
        match router.strip_suffix("# EOF\n") {
            Some(text) => Self(text.to_owned()),
            None => Self(router),
        }
    }

    /// The text.
    pub fn finish(mut self) -> String {
        self.0.push_str("# EOF\n");
        self.0
    }

    /// A figure of the router that may fall.
    pub fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.add(&format!("switchyard_{name}"), "gauge", help, value);
    }

    /// One that only grows.
    pub fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.add(&format!("switchyard_{name}"), "counter", help, value);
    }

    /// Counters of one name that differ by a label. Its values are our words, or names of commands: nothing in them needs an escape.
    pub fn counters<'a>(&mut self, name: &str, help: &str, label: &str, values: impl IntoIterator<Item = (&'a str, f64)>) {
        self.declare(&format!("switchyard_{name}"), "counter", help);
        for (of, value) in values {
            let _ = writeln!(self.0, "switchyard_{name}_total{{{label}=\"{of}\"}} {value}");
        }
    }

    /// Figures of one name that may fall and differ by labels. Their values may come from people.
    pub fn gauges(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = (Vec<(&'static str, String)>, f64)>) {
        self.declare(&format!("switchyard_{name}"), "gauge", help);
        self.samples(name, samples);
    }

    /// The same of figures that only grow.
    pub fn counters_of(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = (Vec<(&'static str, String)>, f64)>) {
        self.declare(&format!("switchyard_{name}"), "counter", help);
        self.samples(&format!("{name}_total"), samples);
    }

    fn samples(&mut self, name: &str, samples: impl IntoIterator<Item = (Vec<(&'static str, String)>, f64)>) {
        for (labels, value) in samples {
            let escaped = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let labels: Vec<String> = labels.iter().map(|(label, of)| format!("{label}=\"{}\"", escaped(of))).collect();
            let _ = writeln!(self.0, "switchyard_{name}{{{}}} {value}", labels.join(","));
        }
    }

    /// A fact that is told by a label.
    pub fn info(&mut self, name: &str, help: &str, label: &str, fact: &str) {
        self.declare(&format!("switchyard_{name}"), "info", help);
        let _ = writeln!(self.0, "switchyard_{name}_info{{{label}=\"{fact}\"}} 1");
    }

    /// A figure by its whole name, of the type `gauge` or `counter`.
    pub fn add(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.declare(name, kind, help);
        let suffix = if kind == "counter" { "_total" } else { "" };
        let _ = writeln!(self.0, "{name}{suffix} {value}");
    }

    fn declare(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }
}
