//! The page and the picture: nothing foreign gets in as markup, nothing malformed breaks them, and they stay small.

use crate::hostile::{ATTACK, attacked, malformed};
use crate::{hostile, sample};
use deuteron_report::{NumberSheet, html, roofline_svg};

#[test]
fn no_string_becomes_markup() {
    let page = html(&attacked());
    let picture = roofline_svg(&attacked());
    for raw in ["<img", "onerror=alert(1)>", "</script><", "\u{2028}", "<!--attack"] {
        assert!(!page.contains(raw), "the page holds {raw:?} as it came");
        assert!(!picture.contains(raw), "the picture holds {raw:?} as it came");
    }
    // Two scripts, one of them data, end where the template ends them.
    assert_eq!(page.matches("</script>").count(), 2);
    assert_eq!(page.matches("<script").count(), 2);
}

#[test]
fn every_string_reaches_the_page() {
    // What was attacked is shown, escaped: an empty page would pass the test above.
    let page = html(&attacked());
    let escaped_markup = "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;";
    let escaped_json = "\\u003c/script\\u003e\\u003cimg src=x onerror=alert(1)\\u003e";
    assert!(page.contains(escaped_markup) && page.contains(escaped_json));
    for field in hostile::FIELDS {
        let marked = format!("{field}:");
        assert!(page.contains(&marked), "{field} is not in the page");
    }
    assert!(ATTACK.contains("onerror"));
}

#[test]
fn the_policy_names_the_script_and_forbids_the_network() {
    let page = html(&sample::small());
    let (_, policy) = page.split_once("Content-Security-Policy\" content=\"").unwrap();
    let (policy, _) = policy.split_once('"').unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-"));
    assert!(!policy.contains("unsafe") && !policy.contains('*') && !policy.contains("http"));
    // The only addresses are names of namespaces.
    let addresses: Vec<&str> =
        page.match_indices("://").map(|(at, _)| &page[at - 5..(at + 20).min(page.len())]).collect();
    assert!(addresses.iter().all(|address| address.contains("www.w3.org")), "{addresses:?}");
}

#[test]
fn a_page_of_gpt2_xl_is_under_two_megabytes() {
    let analysis = sample::large();
    assert!(analysis.ops.len() >= 3000 && analysis.candidates.len() == 300);
    assert!(analysis.before.len() >= 60 && analysis.after.len() >= 60);
    assert!(analysis.after.iter().all(|sheet| sheet.source.len() >= 100));
    assert!(analysis.plans.chosen.kernels >= 1900);
    let page = html(&analysis);
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
    let json = serde_json::to_string(&analysis).unwrap();
    assert!(page.len() < json.len(), "the page's data is not denser than the JSON form");
}

#[test]
fn malformed_analyses_give_pages() {
    for analysis in malformed() {
        let page = html(&analysis);
        assert!(page.trim_end().ends_with("</html>"));
        let picture = roofline_svg(&analysis);
        assert!(picture.trim_end().ends_with("</svg>"));
        for word in ["NaN", "inf"] {
            assert!(!picture.contains(&format!("\"{word}")), "a coordinate of the picture is {word}");
        }
    }
}

#[test]
fn the_same_analysis_gives_the_same_page() {
    assert_eq!(html(&sample::small()), html(&sample::small()));
}

#[test]
fn the_picture_has_a_roof_of_the_cache_where_it_is_above_memory() {
    let mut analysis = sample::small();
    let of = |name: &str, value: f64| NumberSheet { name: name.into(), value, origin: "measured".into() };
    analysis.machine.numbers = vec![of("cache_gbps", 9000.0)];
    let picture = roofline_svg(&analysis);
    assert!(picture.contains("class=\"roof-slope\"") && picture.contains(">cache 9.00 TB/s<"), "{picture}");
    analysis.machine.numbers = vec![of("cache_gbps", 1000.0)];
    assert!(!roofline_svg(&analysis).contains("class=\"roof-slope\""), "slower than memory");
}

#[test]
fn the_picture_shows_roofs_ridges_and_kernels() {
    let analysis = sample::small();
    let picture = roofline_svg(&analysis);
    let drawn = |sheet: &&deuteron_report::KernelSheet| sheet.cost.matrix_flops + sheet.cost.vector_flops > 0;
    let (before, after) = (analysis.before.iter().filter(drawn).count(), analysis.after.iter().filter(drawn).count());
    assert_eq!(picture.matches("roof-point roof-before").count(), before);
    assert_eq!(picture.matches("roof-point roof-after").count(), after);
    assert_eq!(picture.matches("class=\"roof-measured\"").count(), before + after);
    for text in ["memory 4.15 TB/s", "60.0 TFLOP/s", "800 TFLOP/s", "ridge 14.5", "ridge 193"] {
        assert!(picture.contains(text), "{text}");
    }
    // The page holds the same drawing.
    let page = html(&analysis);
    let inside = picture.split_once("fill=\"#ffffff\"/>").unwrap().1;
    assert!(page.contains(inside.trim_end().trim_end_matches("</svg>")));
}

#[test]
fn figures_are_markup() {
    let page = html(&sample::small());
    for text in ["Predicted time", "148</span>", "<b>99</b>", "Verified against f64", "38.4 ms", "NVIDIA H200"] {
        assert!(page.contains(text), "{text}");
    }
}
