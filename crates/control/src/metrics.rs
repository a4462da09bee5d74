//! Text of the metrics page, in addition to the router's own metrics.
//!
//! The page is written in OpenMetrics and converted for readers of the classic format, because the opposite conversion
//! would lose types and units.

use std::fmt::Write as _;

/// Content type of a page in OpenMetrics.
pub(crate) const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Content type of a page in the classic format.
pub(crate) const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Whether a request with these `Accept` headers prefers OpenMetrics to the classic format. Defaults to classic,
/// because not every reader knows OpenMetrics.
pub(crate) fn prefers_openmetrics<'a>(accept: impl IntoIterator<Item = &'a str>) -> bool {
    let (mut open, mut plain) = (0.0, 0.0);
    for range in accept.into_iter().flat_map(|header| header.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
        let quality = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
        let quality: f64 = quality.map_or(1.0, |text| text.parse().unwrap_or(0.0));
        match kind.as_str() {
            "application/openmetrics-text" => open = quality.max(open),
            "text/plain" => plain = quality.max(plain),
            _ => {}
        }
    }
    open > 0.0 && open >= plain
}

/// Converts a page from OpenMetrics to the classic format (0.0.4): there a family has the name of its samples, `info`
/// is a gauge, and there are no units.
pub(crate) fn classic(page: &str) -> String {
    let mut out = String::with_capacity(page.len());
    // The type follows the help text, and the name in the classic format depends on the type.
    let mut help = None;
    for line in page.lines() {
        let Some(comment) = line.strip_prefix("# ") else {
            let _ = writeln!(out, "{line}");
            continue;
        };
        if let Some(text) = comment.strip_prefix("HELP ") {
            help = text.split_once(' ');
        } else if let Some((name, kind)) = comment.strip_prefix("TYPE ").and_then(|text| text.split_once(' ')) {
            let (suffix, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                "unknown" => ("", "untyped"),
                kind => ("", kind),
            };
            if let Some((_, text)) = help.take().filter(|(of, _)| *of == name) {
                let _ = writeln!(out, "# HELP {name}{suffix} {text}");
            }
            let _ = writeln!(out, "# TYPE {name}{suffix} {kind}");
        }
    }
    out
}

/// A metrics page in OpenMetrics.
#[derive(Debug, Default)]
pub struct Page(String);

impl Page {
    /// Starts a page with the router's own metrics.
    pub fn after_router(router: String) -> Self {
        match router.strip_suffix("# EOF\n") {
            Some(text) => Self(text.to_owned()),
            None => Self(router),
        }
    }

    /// Returns the complete text.
    pub fn finish(mut self) -> String {
        self.0.push_str("# EOF\n");
        self.0
    }

    /// Adds whether the router waits as a standby.
    pub fn standby(&mut self, waits: bool) {
        self.gauge(
            "standby_waits",
            "1 while the router waits as a standby, 0 once it serves",
            f64::from(u8::from(waits)),
        );
    }

    /// Adds a gauge.
    pub fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.add(&format!("switchyard_{name}"), "gauge", help, value);
    }

    /// Adds a counter.
    pub fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.add(&format!("switchyard_{name}"), "counter", help, value);
    }

    /// Adds counters that differ by a label. Label values are our own words or command names, so they need no escaping.
    pub fn counters<'a>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (&'a str, f64)>,
    ) {
        self.declare(&format!("switchyard_{name}"), "counter", help);
        for (of, value) in values {
            let _ = writeln!(self.0, "switchyard_{name}_total{{{label}=\"{of}\"}} {value}");
        }
    }

    /// Adds gauges that differ by labels. Label values are escaped.
    pub fn gauges(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Vec<(&'static str, String)>, f64)>,
    ) {
        self.declare(&format!("switchyard_{name}"), "gauge", help);
        self.samples(name, samples);
    }

    /// Adds counters that differ by labels. Label values are escaped.
    pub fn labelled_counters(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Vec<(&'static str, String)>, f64)>,
    ) {
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

    /// Adds facts as labels of one sample, without escaping.
    pub fn info(&mut self, name: &str, help: &str, facts: &[(&str, &str)]) {
        self.declare(&format!("switchyard_{name}"), "info", help);
        let facts: Vec<String> = facts.iter().map(|(label, fact)| format!("{label}=\"{fact}\"")).collect();
        let _ = writeln!(self.0, "switchyard_{name}_info{{{}}} 1", facts.join(","));
    }

    /// Adds a metric by its full name. `kind` is `gauge` or `counter`.
    pub fn add(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.declare(name, kind, help);
        let suffix = if kind == "counter" { "_total" } else { "" };
        let _ = writeln!(self.0, "{name}{suffix} {value}");
    }

    fn declare(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openmetrics_is_for_requests_that_prefer_it() {
        for (accept, open) in [
            ("", false),
            ("*/*", false),
            ("text/plain;version=0.0.4", false),
            ("application/openmetrics-text", true),
            ("Application/OpenMetrics-Text; version=1.0.0; charset=utf-8", true),
            ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1", true),
            ("application/openmetrics-text;q=0.2, text/plain;q=0.5", false),
            ("application/openmetrics-text;q=0", false),
        ] {
            assert_eq!(prefers_openmetrics([accept]), open, "{accept}");
        }
        assert!(
            prefers_openmetrics(["text/plain;q=0.1", "application/openmetrics-text;q=0.2"]),
            "two headers count as one"
        );
    }

    #[test]
    fn classic_families_are_named_as_their_samples() {
        let page = "# HELP a A.\n# TYPE a counter\na_total{l=\"# x\"} 1\n# HELP b B.\n# TYPE b info\nb_info{v=\"1\"} 1\n\
                    # HELP c_seconds C.\n# TYPE c_seconds histogram\n# UNIT c_seconds seconds\nc_seconds_sum 1.0\n# HELP d D.\n# TYPE d gauge\n# EOF\n";
        let classic_page = "# HELP a_total A.\n# TYPE a_total counter\na_total{l=\"# x\"} 1\n# HELP b_info B.\n# TYPE b_info gauge\nb_info{v=\"1\"} 1\n\
                    # HELP c_seconds C.\n# TYPE c_seconds histogram\nc_seconds_sum 1.0\n# HELP d D.\n# TYPE d gauge\n";
        assert_eq!(classic(page), classic_page);
    }
}
