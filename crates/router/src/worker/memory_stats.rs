//! MEMORY STATS of several nodes as of one server: bytes and counts are summed, ratios are recomputed from the sums.

use switchyard_resp::{encode, reply};

/// A ratio of sums: (sum of `over`) / (sum of `under`) * scale.
struct Ratio {
    name: &'static str,
    over: [Part; 2],
    under: [Part; 2],
    scale: f64,
}

/// A figure with its sign; an empty name is ignored.
type Part = (char, &'static str);

const NONE: Part = ('+', "");

/// Ratios that Redis and Valkey compute from other figures of the same reply.
const RATIOS: &[Ratio] = &[
    Ratio {
        name: "keys.bytes-per-key",
        over: [('+', "total.allocated"), ('-', "startup.allocated")],
        under: [('+', "keys.count"), NONE],
        scale: 1.0,
    },
    Ratio {
        name: "dataset.percentage",
        over: [('+', "dataset.bytes"), NONE],
        under: [('+', "total.allocated"), ('-', "startup.allocated")],
        scale: 100.0,
    },
    Ratio {
        name: "peak.percentage",
        over: [('+', "total.allocated"), NONE],
        under: [('+', "peak.allocated"), NONE],
        scale: 100.0,
    },
    Ratio {
        name: "allocator-fragmentation.ratio",
        over: [('+', "allocator.allocated"), ('+', "allocator-fragmentation.bytes")],
        under: [('+', "allocator.allocated"), NONE],
        scale: 1.0,
    },
    Ratio {
        name: "allocator-rss.ratio",
        over: [('+', "allocator.active"), ('+', "allocator-rss.bytes")],
        under: [('+', "allocator.active"), NONE],
        scale: 1.0,
    },
    Ratio {
        name: "rss-overhead.ratio",
        over: [('+', "allocator.resident"), ('+', "rss-overhead.bytes")],
        under: [('+', "allocator.resident"), NONE],
        scale: 1.0,
    },
    Ratio {
        name: "fragmentation",
        over: [('+', "total.allocated"), ('+', "fragmentation.bytes")],
        under: [('+', "total.allocated"), NONE],
        scale: 1.0,
    },
];

/// A figure of the reply.
#[derive(Debug, PartialEq)]
enum Figure {
    /// Bytes, or a count.
    Count(i64),
    /// A ratio, encoded as text in the type of the protocol version.
    Ratio(f64),
    /// Figures of a database.
    Group(Figures),
}

type Figures = Vec<(Vec<u8>, Figure)>;

/// Returns the combined reply of all nodes.
pub(super) fn together(parts: &[Vec<u8>], resp3: bool) -> Vec<u8> {
    let mut sums = Figures::new();
    for part in parts {
        add(&mut sums, part);
    }
    let ratios: Vec<(usize, f64)> =
        sums.iter().enumerate().filter_map(|(at, (name, _))| Some((at, ratio(&sums, name)?))).collect();
    for (at, value) in ratios {
        let figure = &mut sums[at].1;
        // Some ratios are integers and stay integers.
        *figure = if matches!(figure, Figure::Count(_)) { Figure::Count(value as i64) } else { Figure::Ratio(value) };
    }
    let mut out = Vec::new();
    write(&mut out, &sums, resp3);
    out
}

/// Adds the figures of a node, or of one of its databases.
fn add(sums: &mut Figures, part: &[u8]) {
    let mut elements = reply::elements(part);
    while let (Some(name), Some(value)) = (elements.next(), elements.next()) {
        let name = reply::text(name).unwrap_or_default();
        let place = match sums.iter().position(|(n, _)| n == name) {
            Some(place) => place,
            None => {
                let figure = match value.first() {
                    Some(b'*' | b'%') => Figure::Group(Vec::new()),
                    Some(b':') => Figure::Count(0),
                    _ => Figure::Ratio(0.0),
                };
                sums.push((name.to_vec(), figure));
                sums.len() - 1
            }
        };
        match &mut sums[place].1 {
            Figure::Count(sum) => *sum = sum.saturating_add(reply::integer(value).unwrap_or(0)),
            // An unknown ratio: the maximum is the most relevant one.
            Figure::Ratio(most) => {
                let number = reply::text(value).and_then(|t| std::str::from_utf8(t).ok()?.parse().ok()).unwrap_or(0.0);
                *most = most.max(number);
            }
            Figure::Group(group) => add(group, value),
        }
    }
}

/// Returns the recomputed ratio with this name, if it is known.
fn ratio(sums: &Figures, name: &[u8]) -> Option<f64> {
    let ratio = RATIOS.iter().find(|r| r.name.as_bytes() == name)?;
    let sum = |parts: &[Part; 2]| {
        parts.iter().filter(|(_, name)| !name.is_empty()).try_fold(0.0, |sum, (sign, name)| {
            let Figure::Count(count) = sums.iter().find(|(n, _)| n == name.as_bytes())?.1 else { return None };
            Some(if *sign == '-' { sum - count as f64 } else { sum + count as f64 })
        })
    };
    let (over, under) = (sum(&ratio.over)?, sum(&ratio.under)?);
    Some(if under > 0.0 { over / under * ratio.scale } else { 0.0 })
}

fn write(out: &mut Vec<u8>, figures: &Figures, resp3: bool) {
    encode::map(out, figures.len(), resp3);
    for (name, figure) in figures {
        encode::bulk(out, name);
        match figure {
            Figure::Count(count) => encode::integer(out, *count),
            Figure::Ratio(value) if resp3 => out.extend_from_slice(format!(",{value}\r\n").as_bytes()),
            Figure::Ratio(value) => encode::bulk(out, value.to_string().as_bytes()),
            Figure::Group(group) => write(out, group, resp3),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::together;

    fn node(resp3: bool, total: i64, keys: i64, db: &str) -> Vec<u8> {
        let ratio = |v: f64| if resp3 { format!(",{v}\r\n") } else { format!("${}\r\n{v}\r\n", v.to_string().len()) };
        let map = |n: usize| if resp3 { format!("%{n}\r\n") } else { format!("*{}\r\n", 2 * n) };
        let name = |n: &str| format!("${}\r\n{n}\r\n", n.len());
        [
            map(7),
            name("total.allocated") + &format!(":{total}\r\n"),
            name("startup.allocated") + ":100\r\n",
            name(db) + &map(1) + &name("overhead.hashtable.main") + ":8\r\n",
            name("keys.count") + &format!(":{keys}\r\n"),
            name("keys.bytes-per-key") + ":7\r\n",
            name("fragmentation") + &ratio(2.5),
            name("fragmentation.bytes") + ":300\r\n",
        ]
        .concat()
        .into_bytes()
    }

    #[test]
    fn counts_are_added_and_ratios_made_of_the_sums() {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
        for resp3 in [true, false] {
            let parts = [node(resp3, 200, 0, "db.0"), node(resp3, 400, 4, "db.0"), node(resp3, 300, 1, "db.5")];
            let mut expected = text(node(resp3, 900, 5, "db.0"));
            expected = expected.replacen(if resp3 { "%7" } else { "*14" }, if resp3 { "%8" } else { "*16" }, 1);
            expected =
                expected.replace(":100\r\n", ":300\r\n").replace(":8\r\n", ":16\r\n").replace(":7\r\n", ":120\r\n");
            expected = expected.replace("fragmentation.bytes\r\n:300", "fragmentation.bytes\r\n:900");
            expected = if resp3 { expected.replace(",2.5", ",2") } else { expected.replace("$3\r\n2.5", "$1\r\n2") };
            expected += &format!(
                "$4\r\ndb.5\r\n{}$23\r\noverhead.hashtable.main\r\n:8\r\n",
                if resp3 { "%1\r\n" } else { "*2\r\n" }
            );
            assert_eq!(text(together(&parts, resp3)), expected);
        }
    }
}
